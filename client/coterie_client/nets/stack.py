"""Local updates of several users at once, for networks of fully connected layers: one call of torch for a step of all of them.

A loop over users spends most of its time on calls of torch, since a step of a small network is little arithmetic. Here weights have a first
axis of users, and a step makes stacked products. Each user's product has a shape that depends on the experiment and on its own row count
alone: batches are padded with rows of weight 0 to the batch size. All else is elementwise. So a user's bits do not depend on the users
beside it. They differ from those of the loop, whose batches are not padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie_client.learning import Draw, Phase, Tensors, count_steps
from coterie_client.nets.by_rows import ByRows, has_few_rows
from coterie_client.nets.layers import Corrections, Layer, Plan, Weights, product
from coterie_client.nets.slope import Adam
from coterie_client.nets.ticks import PIECE, Ticks, padded_size, ticks_of, whole_size

_MAX_WEIGHTS = 1 << 18  # numbers in the weights that take steps together: more leave the CPU cache
_MAX_STACK = 1 << 22  # numbers in the weights of the users of a stack: 16 MiB
_MAX_GATHERED = 1 << 18  # numbers in the rows of steps that are gathered ahead


class Stack:
    """The weights and rows of users in descending order of their numbers of rows."""

    def __init__(self, plan: Plan, weights: Weights, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._plan, self.weights = plan, weights
        self.n_rows = np.array([len(rows) for rows in targets])
        k, longest = len(inputs), whole_size(int(self.n_rows[0]))
        first = plan.layers[0]
        self._inputs = torch.zeros(k, longest, first.width, device=inputs[0].device)
        self._inputs[..., first.n_in :] = 1
        self._targets = torch.zeros(k, longest, dtype=targets[0].dtype, device=inputs[0].device)
        for i, (rows, known) in enumerate(zip(inputs, targets, strict=True)):
            self._inputs[i, : len(rows), : first.n_in] = rows
            self._targets[i, : len(rows)] = known

    def _features(self, first: int) -> torch.Tensor:
        """(k, m, width) the input of a layer for all rows: the layers before it are fixed."""
        layers = self._plan.layers
        if not first:
            return self._inputs
        k, m, _ = self._inputs.shape
        found = torch.empty(k, m, layers[first].width, device=self._inputs.device)
        rooms = [layer.room(k, PIECE, found) for layer in layers[1 : first + 1]]
        for begin in range(0, m, PIECE):
            here = self._inputs[:, begin : begin + PIECE].transpose(1, 2)
            for layer, weights, room in zip(layers[:first], self.weights[:first], rooms, strict=True):
                here = layer.passed(product(weights, here), room)
            found[:, begin : begin + PIECE] = here.transpose(1, 2)
        return found

    def train(
        self, phase: Phase, moved: Sequence[bool], ticks: Ticks, added: Corrections, has_classes: bool, losses: torch.Tensor | None
    ) -> None:
        """Moves the weights of the moved layers. `losses` (T, k, b) takes the loss of each row of each step."""
        first = list(moved).index(True)
        features = self._features(first)
        k, m, p = features.shape
        is_by_rows = added.is_whole(first) and has_few_rows(int(self.n_rows[0]), phase, p)
        layers = self._plan.layers[first:]
        size = sum(layer.n_out * layer.width for layer in layers[is_by_rows:]) + is_by_rows * 2 * m * layers[0].n_out
        for part in np.array_split(np.arange(k), min(k, -(-k * size // _MAX_WEIGHTS))):
            here = slice(int(part[0]), int(part[-1]) + 1)
            weights, corrections, seen = [own[here] for own in self.weights], added.take(here), features[here]
            by_rows = ByRows(first, weights, corrections, seen, phase, ticks.lengths[here]) if is_by_rows else None
            if by_rows is not None:
                weights, corrections, seen = by_rows.weights, by_rows.added, by_rows.slants
            of_part = Ticks(ticks.rows[:, here], ticks.shares[:, here], ticks.lengths[here])
            steps = _Steps(self._plan.layers, moved, weights, phase, corrections, of_part, has_classes, is_by_rows)
            steps.run(seen, self._targets[here], None if losses is None else losses[:, here])
            if by_rows is not None:
                by_rows.finish()


class _Steps:
    """The steps of one phase for the users of a part."""

    def __init__(
        self,
        layers: Sequence[Layer],
        moved: Sequence[bool],
        weights: Weights,
        phase: Phase,
        added: Corrections,
        ticks: Ticks,
        has_classes: bool,
        is_by_rows: bool,
    ) -> None:
        self._layers, self._moved, self._phase, self._added, self._ticks = layers, moved, phase, added, ticks
        self._first = list(moved).index(True)
        self._has_classes, self._is_by_rows, self._is_adam = has_classes, is_by_rows, phase.optimizer == "adam"
        empty = [torch.zeros_like(own if is_moved else own[..., :0]) for own, is_moved in zip(weights, moved, strict=True)]
        self._arrays = [weights, empty]  # and velocities of sgd, gradients of adam
        if self._is_adam:
            self._arrays += [[torch.zeros_like(own) for own in empty] for _ in range(2)]
        k, b = ticks.rows.shape[1:]
        self._rooms = [layer.room(k, b, weights[0]) for layer in layers[self._first + 1 :]]
        self._views: tuple[list[Weights], Weights] = ([], [])
        self._n = self._n_steps = 0

    def run(self, features: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor | None) -> None:
        """All steps, on rows of features (k, m, p) with targets (k, m)."""
        lengths, n_outputs = self._ticks.lengths, self._layers[-1].n_out
        k, m, p = features.shape
        rows = torch.from_numpy(self._ticks.rows[: lengths[0]]).to(features.device)[:, :, None]  # (T, k, 1, b), as what follows
        shares = torch.from_numpy(self._ticks.shares[: lengths[0]]).to(features.device)[:, :, None]
        flat = rows + m * torch.arange(k, device=rows.device)[:, None, None]
        active = (lengths > np.arange(lengths[0])[:, None]).sum(axis=1).tolist()
        ahead = max(1, _MAX_GATHERED // (flat[0].numel() * max(p, n_outputs)))
        for begin in range(0, len(rows), ahead):
            chosen, own = flat[begin : begin + ahead], shares[begin : begin + ahead]
            inputs = features.reshape(k * m, p).index_select(0, chosen.view(-1)).view(len(chosen), k, -1, p).transpose(2, 3)
            known = targets.reshape(-1)[chosen]
            wanted = known * -own  # - share y, or - share for the outputs of known classes
            if self._has_classes:
                wanted = torch.zeros(len(chosen), k, n_outputs, own.shape[-1], device=own.device).scatter_(2, known, -own)
            listed = zip(inputs, rows[begin : begin + ahead], known, wanted, own, strict=True)
            for t, arrays in enumerate(listed, begin):
                n = active[t]
                of_step = arrays if n == k else [array[:n] for array in arrays]
                self._step(n, of_step, None if losses is None else losses[t, :n])

    def _step(self, n: int, arrays: Sequence[torch.Tensor], losses: torch.Tensor | None) -> None:
        """One step of the first n users on inputs (n, p, b). Row numbers, targets and shares are (n, 1, b); `wanted` is (n, outputs, b)."""
        inputs, rows, known, wanted, shares = arrays
        if n != self._n:
            self._n = n
            self._views = [[own[:n] for own in listed] for listed in self._arrays], [room[:n] for room in self._rooms]
        (weights, slopes, *moments), rooms = self._views
        layers, first = self._layers, self._first
        if self._is_by_rows:
            outputs = weights[first].gather(2, rows.expand(-1, layers[first].n_out, -1))
        else:
            outputs = product(weights[first], inputs)
        seen = [inputs]
        for j, room in enumerate(rooms, first):
            seen.append(layers[j].passed(outputs, room))
            outputs = product(weights[j + 1], seen[-1])
        delta = torch.addcmul(wanted, self._judged(outputs, known, losses), shares)  # the gradient of the mean loss
        beta = 0.0 if self._is_adam else self._phase.momentum
        for j in range(len(layers) - 1, first - 1, -1):
            if self._moved[j]:
                if 1 in slopes[j].shape[1:]:
                    slopes[j].mul_(beta).add_(product(delta, seen[j - first].transpose(1, 2)))
                else:
                    slopes[j].baddbmm_(delta, seen[j - first].transpose(1, 2), beta=beta)
            if j > first:
                n_in = layers[j].n_in
                delta = product(weights[j][..., :n_in].transpose(1, 2), delta)
                if layers[j - 1].has_relu:
                    delta = torch.ops.aten.threshold_backward(delta, seen[j - first][:, :n_in], 0)
        self._n_steps += 1
        for j, is_moved in enumerate(self._moved):
            if is_moved:
                self._move(j, n, weights[j], slopes[j], [moment[j] for moment in moments])

    def _judged(self, outputs: torch.Tensor, known: torch.Tensor, losses: torch.Tensor | None) -> torch.Tensor:
        """(n, outputs, b) what is to be like the targets: probabilities of classes, or numbers."""
        if not self._has_classes:
            if losses is not None:
                losses.copy_((outputs - known)[:, 0].square_().div_(2))
            return outputs
        if losses is None:
            return torch.softmax(outputs, 1)
        logs = torch.log_softmax(outputs, 1)
        losses.copy_(logs.gather(1, known)[:, 0].neg_())
        return logs.exp_()

    def _move(self, j: int, n: int, w: torch.Tensor, slope: torch.Tensor, moments: Weights) -> None:
        """As the optimizers of `slope`."""
        phase, added = self._phase, self._added
        if phase.weight_decay:
            slope.add_(w, alpha=phase.weight_decay)
        if added.anchor is not None and added.is_pulled is not None:
            slope.addcmul_(w - added.anchor[j][:n], added.is_pulled[j][:n], value=added.mu)
        if added.shift is not None:
            slope.add_(added.shift[j][:n])
        if not self._is_adam:
            w.sub_(slope, alpha=phase.lr)
            return
        (first, second), (first_beta, second_beta), steps = moments, Adam.BETAS, self._n_steps
        first.lerp_(slope, 1 - first_beta)
        second.mul_(second_beta).addcmul_(slope, slope, value=1 - second_beta)
        scale = (second.sqrt() / math.sqrt(1 - second_beta**steps)).add_(Adam.EPSILON)
        w.addcdiv_(first, scale, value=-phase.lr / (1 - first_beta**steps))


def _corrections(plan: Plan, phase: Phase, order: Indices, device: torch.device) -> Corrections:
    found = Corrections(shift=None if phase.shift is None else plan.stacked(phase.shift, order, device))
    if phase.pull is None:
        return found
    mu, anchors = phase.pull
    ones = {name: np.ones_like(array) for name, array in anchors.items()}
    return found._replace(mu=mu, anchor=plan.stacked(anchors, order, device), is_pulled=plan.stacked(ones, order, device))


def fit_stack(
    plan: Plan,
    tensors: Tensors,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    phases: Sequence[Phase],
    draw: Draw,
    is_moved: Callable[[str, Phase], bool],
    has_classes: bool,
) -> tuple[dict[str, NDArray[Any]], Array] | None:
    """The tensors of k users after their phases, and (k,) their mean losses in the last one with a step; None without any."""
    counts = np.array([len(own) for own in targets])
    moves = [[is_moved(f"{layer.name}weight", phase) for layer in plan.layers] for phase in phases]
    working = [number for number, phase in enumerate(phases) if any(moves[number]) and count_steps(int(counts.max()), phase)]
    if not working:
        return None
    order = np.argsort(-counts, kind="stable")
    draw = replace(draw, user=tuple(draw.user[i] for i in order.tolist()))
    device = targets[0].device
    weights = plan.stacked(tensors, order, device)
    stack = Stack(plan, weights, [inputs[i] for i in order.tolist()], [targets[i] for i in order.tolist()])
    found = np.empty(counts.size)
    for number in working:
        phase = phases[number]
        ticks = ticks_of(stack.n_rows, phase, draw, number)
        losses = torch.zeros(ticks.rows.shape, device=device) if number == working[-1] else None
        stack.train(phase, moves[number], ticks, _corrections(plan, phase, order, device), has_classes, losses)
        if losses is not None:
            found[order] = _mean_losses(losses, ticks)
    return plan.named(weights, order), found


def _mean_losses(losses: torch.Tensor, ticks: Ticks) -> Array:
    """(k,) the means over the batches of each user."""
    found = losses.cpu().numpy().astype(np.float64) * ticks.shares
    return np.array([np.ascontiguousarray(found[:n, i]).sum() / n for i, n in enumerate(ticks.lengths.tolist())])


def stacks(plan: Plan, counts: Indices, phases: Sequence[Phase]) -> Iterator[Indices]:
    """The places of users with these numbers of rows that are trained together: their products have one shape."""
    widest = max(layer.width for layer in plan.layers)

    def shapes(n_rows: int) -> list[int]:
        whole = whole_size(n_rows)
        return [size for phase in phases for size in (padded_size(n_rows, phase), whole * has_few_rows(n_rows, phase, widest))]

    found = np.array([shapes(int(m)) for m in counts], dtype=np.int64).reshape(counts.size, 2 * len(phases))
    size = max(1, _MAX_STACK // sum(layer.n_out * layer.width for layer in plan.layers))
    for each in np.unique(found, axis=0):
        group = np.flatnonzero((found == each).all(axis=1))
        yield from np.array_split(group, -(-group.size // size))

"""Extrapolation of a fixed-point iteration: exact on small linear maps, plain where the guard says so, the same bits every time."""

import dataclasses

import numpy as np
import pytest

from coterie_server.maths import anderson
from tests.bits import printed


def iterate(g, u, depth, rounds):
    """The u_t, and the memory after each."""
    memory, us, memories = None, [u], []
    for _ in range(rounds):
        value = g(us[-1])
        memory, following = anderson.step(memory, value, value - us[-1], depth)
        us.append(following)
        memories.append(memory)
    return us, memories


def contraction(k, seed=0):
    """A linear map u -> A u + b of norm .999, and its fixed point."""
    random = np.random.default_rng(seed)
    a = random.normal(size=(k, k))
    a *= 0.999 / np.linalg.norm(a, 2)
    b = random.normal(size=k)
    return (lambda u: a @ u + b), np.linalg.solve(np.eye(k) - a, b)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_linear_map_of_k_numbers_is_solved_in_k_plus_2_steps(k):
    """As GMRES does (Walker and Ni, 2011): the differences of the residual span everything by then. Plain steps would need thousands."""
    g, fixed = contraction(k)
    us, _ = iterate(g, np.zeros(k), k, k + 2)
    assert np.linalg.norm(us[-1] - fixed) < 1e-6 * np.linalg.norm(fixed)
    plain = np.zeros(k)
    for _ in range(k + 2):
        plain = g(plain)
    assert np.linalg.norm(plain - fixed) > 1e-2 * np.linalg.norm(fixed)


def test_the_second_step_is_the_secant_through_the_first_two():
    """Depth 1: w = (f_1.df)/(df.df) with df = f_1 - f_0, and u_2 = g(u_1) - w (g(u_1) - g(u_0))."""

    def g(u):
        return np.cos(u)

    us, _ = iterate(g, np.array([0.2, 1.0]), 1, 2)
    f0, f1 = g(us[0]) - us[0], g(us[1]) - us[1]
    w = f1 @ (f1 - f0) / ((f1 - f0) @ (f1 - f0))
    np.testing.assert_array_equal(us[1], g(us[0]))
    np.testing.assert_allclose(us[2], g(us[1]) - w * (g(us[1]) - g(us[0])), rtol=1e-8)


def test_no_more_differences_are_kept_than_asked_for_and_their_products_are_theirs():
    g, _ = contraction(20)
    _, memories = iterate(g, np.zeros(20), 3, 8)
    assert [len(memory.values) for memory in memories] == [0, 1, 2, 3, 3, 3, 3, 3]
    for memory in memories[1:]:
        together = np.stack(memory.residuals)
        np.testing.assert_allclose(memory.products, together @ together.T, rtol=1e-12)
        np.testing.assert_allclose(memory.lengths, (np.stack(memory.values) ** 2).sum(axis=1), rtol=1e-12)


def test_a_residual_that_has_not_shrunk_with_the_extrapolations_gets_a_plain_step():
    """Ten extrapolations may have left |f| at ten times |f_0| / 2, a hundred at ten times |f_0| / 11."""
    g, _ = contraction(6)
    us, memories = iterate(g, np.zeros(6), 3, 4)
    value = g(us[-1])
    size = np.linalg.norm(value - us[-1])
    for taken, factor in ((0, 10.0), (10, 5.0), (100, 10 / 11)):
        for first, is_plain in ((0.99 * size / factor, True), (1.01 * size / factor, False)):
            memory = dataclasses.replace(memories[-1], first=first, taken=taken)
            after, following = anderson.step(memory, value, value - us[-1], 3)
            assert (following == value).all() == is_plain
            assert after.taken == taken + (not is_plain)


@pytest.mark.parametrize("start", [3.0, 100.0])
def test_a_step_is_bounded_where_the_residual_hardly_changes(start):
    """g(u) = u - arctan(u) / 2 far from 0: F is next to nothing, and a fit without its ridge leaps by |f| |G| / |F|, up to 1e15."""
    us, _ = iterate(lambda u: u - np.arctan(u) / 2, np.array([start]), 1, 50)
    assert max(abs(u[0]) for u in us) < 1e5


def test_at_the_fixed_point_nothing_moves():
    us, _ = iterate(lambda u: u, np.array([1.0, 2.0]), 5, 4)
    assert (us[-1] == us[0]).all()


def test_a_step_writes_into_nothing_that_it_was_given():
    g, _ = contraction(30)
    us, memories = iterate(g, np.zeros(30), 4, 6)
    value = g(us[-1])
    residual = value - us[-1]
    kept = [array.copy() for array in (value, residual, *memories[-1].values, *memories[-1].residuals, memories[-1].products)]
    anderson.step(memories[-1], value, residual, 4)
    for before, now in zip(kept, (value, residual, *memories[-1].values, *memories[-1].residuals, memories[-1].products), strict=True):
        np.testing.assert_array_equal(before, now)


def test_the_bits_do_not_depend_on_how_many_threads_blas_has():
    """Of vectors so long a plain scalar product does."""
    code = """if True:
        import numpy as np
        from coterie_server.maths import anderson
        random, memory = np.random.default_rng(0), None
        u = random.normal(size=300_000)
        for _ in range(5):
            value = 0.9 * u + 0.01 * random.normal(size=u.size)
            memory, u = anderson.step(memory, value, value - u, 3)
        print(u.tobytes().hex()[-4096:], memory.products.tobytes().hex())
    """
    assert len(printed(code, 1, 2)) == 1

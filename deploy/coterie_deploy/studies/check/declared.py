"""Checks of what a method says of itself: its halves, and who learns what."""

from coterie.errors import CoterieError
from coterie.experiment.config import Experiment
from coterie.experiment.reveals import answered_by, is_answered
from coterie.registry import method
from coterie.wire.messages import declared
from coterie_client.interface.half import client_half
from coterie_client.interface.local_update import local_update
from coterie_deploy.studies.check.trial import Failed, Trial
from coterie_server.interface.half import FLAT_ONLY, server_half
from coterie_server.record.rundb import read_run
from coterie_server.run.plan import stages_of

_NOT_TOLD = "C9"  # the rule by which a host refuses a step


def why_flat(experiment: Experiment) -> str:
    """Why the experiment cannot run with aggregators, "" where it can."""
    if experiment.masks_sums:
        return "aggregators would see the sums that masks are to hide"
    flat = [stage.method for stage in stages_of(experiment) if server_half(stage.method).tiers == FLAT_ONLY]
    return f"method {flat[0]!r} cannot run with aggregators" if flat else ""


def halves(trial: Trial) -> str:
    """The method has what a run needs of it."""
    name = trial.experiment.method.name
    try:
        server_half(name)
    except LookupError:
        raise Failed(f"method {name!r} has no server half: want SERVER, or the room of a family that has one") from None
    found = client_half(name)
    if found is None:
        raise Failed(f"method {name!r} has no client half: want CLIENT, or the room of a family that has one")
    update = local_update(name)
    carried = {*update.down, *update.up, *update.told}
    if found[0] != name and (missed := [cls.__name__ for cls in declared(name) if cls not in carried]):
        wanted = "want CLIENT, or UPDATE with them in down, up or told"
        raise Failed(f"method {name!r} declares the messages {', '.join(missed)}, but has no client half that takes them: {wanted}")
    return ""


def reveals(trial: Trial) -> str:
    """Every step that travels is named by a reveal, and each reveal says something of steps that there are."""
    name = trial.experiment.method.name
    listed = method(name).reveals
    if not listed:
        raise Failed(f"method {name!r} has no reveal, want one for each thing that it sends of a user")
    settings = set(method(name).config.model_fields)
    said = frozenset(step for reveal in listed for step in reveal.steps)
    for reveal in listed:
        if not (reveal.up and reveal.concluded and reveal.steps):
            raise Failed(f"a reveal of method {name!r} lacks what travels, what can be concluded or its steps: {reveal}")
        if strange := {*reveal.needs, *reveal.unless} - settings:
            raise Failed(f"a reveal of method {name!r} depends on {', '.join(sorted(strange))}, which is none of its settings")
    for step in sorted(said):
        whose, _, of_room = step.partition("/")
        if not any(of_room in ("", cls.step) for cls in declared(whose)):
            raise Failed(f"a reveal of method {name!r} names step {step!r}, but no message is declared for it")
    for cls in declared(name):
        if not is_answered(said, cls.method, cls.step):
            raise Failed(f"step {cls.step!r} of method {name!r} ({cls.__name__}) is named by no reveal")
    _check_travelled(trial)
    return ""


def _check_travelled(trial: Trial) -> None:
    """Failed where the undisturbed run has sent something else than its owner was told."""
    try:
        folder = trial.calm.folder
    except Exception as error:
        if isinstance(error, CoterieError) and error.finding.rule == _NOT_TOLD:
            raise Failed(f"no reveal holds with these settings: {error}") from error
        return  # another check says so
    answered = answered_by(trial.experiment)
    with read_run(folder) as connection:
        found = connection.execute("SELECT DISTINCT kind, step FROM ledger WHERE seq > 0 AND step != 'control' ORDER BY 1").fetchall()
    for kind, step in found:
        if not is_answered(answered, kind.partition(".")[0], step):
            raise Failed(f"the run has sent {kind} of step {step!r}, which no reveal names")

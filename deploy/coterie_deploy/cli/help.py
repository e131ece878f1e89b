"""The overview of `coterie --help`: all commands in groups, each with a line that fits 80 columns; and `coterie help COMMAND|NAME`."""

import shutil
from collections.abc import Mapping
from typing import Any, Final

from typer.core import TyperGroup

GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Run": {
        "experiments": "List the shipped experiments.",
        "run": "Run an experiment on this machine, on Slurm or on Ray.",
        "server": "Coordinate a run whose hosts are on other machines.",
        "client": "Serve some users in the run of a server.",
        "aggregator": "Connect a coordinator with the hosts of one known cluster.",
        "health": "Ask whether a server or a client works, for probes.",
    },
    "Look": {
        "show": "Show stages, warnings and clusters of a run.",
        "coefficients": "Show the models of a run by name, with standard errors.",
        "watch": "Watch a run until it ends.",
        "report": "Write a report as one HTML file, of one run or several.",
        "dashboard": "Show all runs below a folder in a browser.",
        "ledger": "Show what a run communicated, next to the closed form.",
        "events": "Show the events of a run: joins, losses, warnings, resumes.",
        "project": "Estimate how long a run would take on other links.",
        "export": "Export a run's metrics to TensorBoard or MLflow.",
    },
    "Study": {
        "compare": "Compare methods or settings with the same seeds.",
        "attack": "See what hosts that lie do, and which rule helps.",
        "tune": "Choose settings of a method by cross-validation.",
        "adapt": "Let new users join a finished run.",
        "certify": "Certify for which penalties clusters are found.",
        "reproduce": "Reproduce a figure or a table of a paper.",
    },
    "Data and privacy": {
        "data": "Show how an experiment's rows are divided among its users.",
        "policy": "Write a policy: what experiments may ask of your data.",
        "predict": "Apply a user's final model to the rows of a table.",
        "models": "Export the users' networks.",
    },
    "Deploy": {
        "certs": "Make certificates for the members of a federation.",
        "slurm": "Write a batch script: a Slurm job for all members.",
        "compose": "Write a Compose file: a container for each member.",
        "swarm": "Write a stack of Docker Swarm: a service for each member.",
        "kubernetes": "Write Kubernetes manifests: a pod for each member.",
    },
    "Extend": {
        "new": "Write an experiment, or a package with a method of yours.",
        "check": "Check that a method or compressor keeps what Coterie promises.",
    },
}
_LAST: Final = "Others"  # commands without a group


def _say_keys(name: str, ctx: Any) -> None:
    """Prints the keys of a method, a source, a model or a section, and ends the command; nothing if there is no such thing."""
    from coterie.registry import is_method  # noqa: PLC0415 - the overview needs no methods
    from coterie_deploy.cli.options import import_from_here  # noqa: PLC0415 - it imports this module

    import_from_here()
    from coterie_deploy.read.keys import lines_of, sections  # noqa: PLC0415 - as above

    if is_method(name) or name in sections():
        print("\n".join(lines_of(name, shutil.get_terminal_size().columns)))  # noqa: T201 - what the command says
        ctx.exit()


class GroupedCommands(TyperGroup):
    """The root command. Its overview has groups, `help COMMAND` is `COMMAND --help`, and `help NAME` explains keys."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes each group as a section. Lines too long for the terminal are wrapped, not cut."""
        names = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        width = max(map(len, names), default=0)
        grouped = {name for lines in GROUPS.values() for name in lines}
        others = {name: self.commands[name].get_short_help_str(formatter.width) for name in names if name not in grouped}
        for title, lines in {**GROUPS, _LAST: others}.items():
            rows = [(name.ljust(width), line) for name, line in lines.items() if name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As without it, but for `help`."""
        if args[:1] == ["help"]:
            if len(args) == 2 and args[1] not in self.commands:
                _say_keys(args[1], ctx)
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

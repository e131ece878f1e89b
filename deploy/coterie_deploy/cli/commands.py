"""All commands: importing this module registers them with `app`, in the order of the help."""

from coterie_deploy.cli import runs, data, new, studies, looking, containers, jobs  # noqa: F401, I001 - the order of the help
from coterie_deploy.cli.options import app

__all__ = ["app"]

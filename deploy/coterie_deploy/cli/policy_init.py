"""`coterie policy init FILE.csv`: a first policy from the cells of a table, for its owner to edit."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from coterie.errors import ConfigError
from coterie_deploy.cli.data_schema import columns_of

_COMMENT = """\
# The policy of the owner of {path}: what an experiment may ask of it. Guessed from its cells: read it, and remove what no
# experiment may ask for. A missing key allows everything. coterie client --policy FILE, or policy.yaml in the data folder.
"""
_REST = """\
min_rows: 3            # users with fewer training rows (held-out ones do not count) do not take part: sums of one or two rows reveal them
# methods: [pdmm]      # that may run; absent: any
# references: []       # that may run beside; absent: any
standardize: true      # sums of each feature travel
pseudonyms: false      # true: users travel as keyed hashes of their names
code: false            # whether an experiment may name code to import here
"""


def policy_text(path: Path) -> str:
    """The policy. ConfigError when the file is no table."""
    columns = columns_of(path)
    n_rows = max((seen.n_rows for seen, _ in columns.values()), default=0)
    if not n_rows:
        raise ConfigError(f"{path} has {len(columns)} columns and no rows, want a header and rows")
    unlike = [name for name, (seen, known) in columns.items() if seen.looks_like_identifier(known)]
    kinds = {name: seen.kind(known) for name, (seen, known) in columns.items() if name not in unlike}
    few = {name for name in kinds if columns[name][0].has_few_values}
    measured = [name for name, kind in kinds.items() if kind in ("number", "boolean")]
    used = [name for name, kind in kinds.items() if kind in ("number", "boolean", "date") or (kind == "text" and name in few)]
    grouped = [name for name, kind in kinds.items() if kind == "text" or name in few]
    lines = ["columns:"]
    for key, names, why in (
        ("users", grouped, "text, or few values"),
        ("clusters", grouped, "likewise"),
        ("targets", measured, "numbers, yes and no"),
        ("features", used, "these, dates, and text of few values; experiments have to list theirs"),
    ):
        lines.append(f"  {key}: {_flow(names)}  # {why}")
    lines += [f"  # in no list, since each row has another value: {_flow(unlike)}"] if unlike else []
    return _COMMENT.format(path=path.name) + "\n".join(lines) + "\n" + _REST


def init_policy(table: Path, output: Path, *, overwrite: bool) -> str:
    """Writes the policy, and returns a sentence about it. ConfigError if the file exists."""
    text = policy_text(table)
    try:
        with output.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} exists already, want another --output, or --overwrite") from None
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}") from error
    return f"a first policy is in {output}: read it, and remove what no experiment may ask for"


def _flow(names: Sequence[str]) -> str:
    return yaml.safe_dump(list(names), default_flow_style=True, width=10_000, allow_unicode=True).strip()

"""A client's private data: its users, their rows, the held-out split, and standardisation.

Importing this is light: it needs NumPy and pydantic. The Parquet reader imports pyarrow on first use. The configuration is
`coterie.experiment.data.DataConfig`.
"""

from coterie_client.data.load import Fresh, count_users, fresh_rows, list_users, load_users, read_users, summarize_users
from coterie_client.data.pool import UserSummary
from coterie_client.data.sources import user_source
from coterie_client.data.standardize import Totals, deviations, filled, standardize, totals
from coterie_client.data.users import Reading, UserData, UserHead

__all__ = [
    "Fresh", "Reading", "Totals", "UserData", "UserHead", "UserSummary", "count_users", "deviations",
    "filled", "fresh_rows", "list_users", "load_users", "read_users", "standardize", "summarize_users", "totals", "user_source",
]  # fmt: skip

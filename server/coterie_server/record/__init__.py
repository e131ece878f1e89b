"""The run database: its tables, and queries on them."""

"""A run folder read: tables, frames, models, predictions, totals of the ledger, and exports."""

"""The run database: what is written to it, and the questions that are asked of it."""

"""Text and tables for a terminal, and the signals that stop a role."""

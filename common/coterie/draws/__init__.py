"""Random numbers: named streams, and shared coins."""

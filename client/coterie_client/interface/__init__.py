"""The interfaces of client halves and of local updates."""

"""The experiment: its sections, the registry of methods, and what a host's owner has to accept."""

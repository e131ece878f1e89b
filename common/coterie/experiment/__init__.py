"""The experiment: its sections, the methods that there are, and what of it a host's owner has to accept."""

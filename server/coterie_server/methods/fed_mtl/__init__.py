"""Multi-task learning: the half, and relations between users."""

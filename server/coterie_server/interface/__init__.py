"""The interface of a server half: its hooks, its stages, and its exchanges with users."""

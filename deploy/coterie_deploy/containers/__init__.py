"""Federations in containers: who is in one, and the files and certificates that start it."""

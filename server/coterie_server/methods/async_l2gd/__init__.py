"""Async-L2GD: the coordinator's half, and how an aggregator walks its cluster through the iterations."""

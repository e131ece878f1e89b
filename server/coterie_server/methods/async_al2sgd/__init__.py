"""Async-AL2SGD+: the coordinator's half, its rates and counts, and how an aggregator walks its cluster through the iterations."""

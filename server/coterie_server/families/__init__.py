"""Shared by several server halves: local training, known clusters, sums of derivatives, and preparation."""

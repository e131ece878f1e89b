"""Masked sums: hosts add masks that cancel in the total, so that their parent sees the total alone. Pure functions and state machines."""

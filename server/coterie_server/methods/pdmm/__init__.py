"""Convex clustering by PDMM: the half, its rounds, pairs of users, messages, counts, and the choice of rho."""

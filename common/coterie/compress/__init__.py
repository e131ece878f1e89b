"""Compression of vectors and weights between a half's answer and its encoding, so that no method knows of it."""

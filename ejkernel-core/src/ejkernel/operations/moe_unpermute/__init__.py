"""Weighted sums of what experts made of tokens."""

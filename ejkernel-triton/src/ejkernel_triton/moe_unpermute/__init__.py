"""Weighted sums of what experts return, in Triton."""

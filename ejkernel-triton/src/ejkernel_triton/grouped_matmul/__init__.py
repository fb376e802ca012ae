"""Grouped matrix multiplication in Triton."""

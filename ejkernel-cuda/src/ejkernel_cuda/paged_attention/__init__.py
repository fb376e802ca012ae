"""Attention over a paged cache in CUDA C++."""

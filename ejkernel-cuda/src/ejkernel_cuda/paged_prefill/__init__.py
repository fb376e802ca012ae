"""Attention of many new tokens over a paged cache in CUDA C++ for Hopper."""

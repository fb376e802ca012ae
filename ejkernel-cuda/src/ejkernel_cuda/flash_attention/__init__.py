"""Attention in CUDA C++ for Hopper."""

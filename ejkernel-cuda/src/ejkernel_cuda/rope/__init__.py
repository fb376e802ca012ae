"""Rotary position embedding in CUDA C++."""

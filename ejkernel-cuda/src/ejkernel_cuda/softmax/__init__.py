"""Softmax in CUDA C++."""

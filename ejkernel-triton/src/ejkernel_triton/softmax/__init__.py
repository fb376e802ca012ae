"""Softmax in Triton."""

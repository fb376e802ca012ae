"""Softmax attention in Triton."""

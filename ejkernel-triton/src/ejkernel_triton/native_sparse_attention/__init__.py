"""Attention over selected blocks in Triton."""

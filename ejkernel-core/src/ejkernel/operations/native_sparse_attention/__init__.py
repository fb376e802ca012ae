"""Attention over the blocks of keys that each query selects."""

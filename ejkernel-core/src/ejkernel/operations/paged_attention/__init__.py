"""Attention of packed queries over a paged cache of keys and values."""

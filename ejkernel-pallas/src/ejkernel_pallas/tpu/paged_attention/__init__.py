"""Attention over a paged cache on TPU."""

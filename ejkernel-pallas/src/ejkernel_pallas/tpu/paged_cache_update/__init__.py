"""Paged KV cache update on TPU."""

"""Paged KV cache update in Triton."""

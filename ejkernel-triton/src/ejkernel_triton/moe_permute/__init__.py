"""Sorting tokens by experts in Triton."""

"""Normalisation and rotary position embedding of queries and keys in Triton."""

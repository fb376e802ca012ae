"""Copies of tokens at positions among sorted rows."""

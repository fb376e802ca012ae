"""Copies of tokens in the order of their experts."""

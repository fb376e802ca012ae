"""Logarithm of a sum of exponentials, of each row."""

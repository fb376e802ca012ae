"""Softmax attention over dense or packed sequences."""

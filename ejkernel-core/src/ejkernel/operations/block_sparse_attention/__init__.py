"""Softmax attention over the tiles that a mask names."""

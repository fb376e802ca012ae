"""Softmax attention on TPU."""

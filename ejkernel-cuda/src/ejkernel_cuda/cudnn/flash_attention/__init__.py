"""Attention in cuDNN."""

"""Gated linear units in Triton."""

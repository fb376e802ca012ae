"""Rotary position embedding in Triton."""

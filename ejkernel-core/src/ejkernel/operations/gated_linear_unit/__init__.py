"""Gated linear units: SwiGLU, GeGLU, ReGLU, GLU."""

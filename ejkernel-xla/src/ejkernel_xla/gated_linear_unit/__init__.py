"""Gated linear units on XLA."""

from ejkernel_xla.gated_linear_unit.kernel import backward, forward

__all__ = ["backward", "forward"]

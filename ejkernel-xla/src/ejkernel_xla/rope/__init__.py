"""Rotary position embedding on XLA."""

from ejkernel_xla.rope.kernel import backward, forward

__all__ = ["backward", "forward"]

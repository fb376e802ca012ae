"""Normalisation and rotary position embedding of queries and keys on XLA."""

from ejkernel_xla.qk_norm_rope.kernel import backward, forward

__all__ = ["backward", "forward"]

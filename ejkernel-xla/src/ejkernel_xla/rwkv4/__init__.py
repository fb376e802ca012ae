"""RWKV-4's time mixing on XLA: one token after the other."""

from ejkernel_xla.rwkv4.kernel import backward, forward

__all__ = ["backward", "forward"]

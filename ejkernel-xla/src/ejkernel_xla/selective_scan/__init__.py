"""Selective scan on XLA: one token after the other, or a chunk at once as an associative scan."""

from ejkernel_xla.selective_scan.kernel import backward, forward

__all__ = ["backward", "forward"]

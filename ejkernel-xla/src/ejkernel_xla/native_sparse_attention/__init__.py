"""Attention over selected blocks on XLA: the blocks of a tile of queries are gathered, never those of all."""

from ejkernel_xla.native_sparse_attention.kernel import backward, forward

__all__ = ["backward", "forward"]

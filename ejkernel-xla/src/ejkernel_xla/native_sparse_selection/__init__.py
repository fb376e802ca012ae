"""The choice of blocks of native sparse attention on XLA: scores of a tile of queries at a time."""

from ejkernel_xla.native_sparse_selection.kernel import forward

__all__ = ["forward"]

"""The lightning indexer on XLA: scores of a tile of queries at a time."""

from ejkernel_xla.lightning_indexer.kernel import forward

__all__ = ["forward"]

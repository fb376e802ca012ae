"""Writing into a paged cache on XLA."""

from ejkernel_xla.paged_cache_update.kernel import backward, forward

__all__ = ["backward", "forward"]

"""Choice of experts on XLA."""

from ejkernel_xla.moe_route.kernel import backward, forward

__all__ = ["backward", "forward"]

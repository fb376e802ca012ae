"""Short causal convolutions on XLA."""

from ejkernel_xla.causal_conv1d.kernel import backward, forward

__all__ = ["backward", "forward"]

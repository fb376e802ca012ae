"""Next tokens drawn from logits on XLA."""

from ejkernel_xla.sample_tokens.kernel import forward

__all__ = ["forward"]

"""Kullback-Leibler divergence on XLA: tiles of logits, never all of them where heads make them."""

from ejkernel_xla.kl_divergence.kernel import backward, forward

__all__ = ["backward", "forward"]

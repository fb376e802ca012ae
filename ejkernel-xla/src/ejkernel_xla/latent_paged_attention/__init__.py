"""Latent attention over a paged cache on XLA: `paged_attention` with one key head, whose keys are their own values."""

from ejkernel_xla.latent_paged_attention.kernel import backward, forward

__all__ = ["backward", "forward"]

"""Latent attention over selected tokens on XLA: the tokens of a tile of queries are gathered, never those of all."""

from ejkernel_xla.sparse_latent_attention.kernel import backward, forward

__all__ = ["backward", "forward"]

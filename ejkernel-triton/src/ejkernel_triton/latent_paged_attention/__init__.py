"""Attention of absorbed latent queries over a paged cache of latents in Triton."""

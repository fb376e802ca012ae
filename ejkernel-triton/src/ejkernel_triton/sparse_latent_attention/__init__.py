"""Latent attention over the tokens that each query names in Triton."""

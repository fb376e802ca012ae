"""Latent attention over the tokens that each query selects."""

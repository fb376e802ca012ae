"""Kullback-Leibler divergence over a vocabulary."""

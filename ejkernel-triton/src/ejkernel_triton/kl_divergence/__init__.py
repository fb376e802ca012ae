"""Kullback-Leibler divergence of logits or hidden states in Triton."""

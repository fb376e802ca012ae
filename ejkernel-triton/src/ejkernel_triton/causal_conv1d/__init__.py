"""Short causal convolutions in Triton."""

"""Short causal convolution, one filter per channel."""

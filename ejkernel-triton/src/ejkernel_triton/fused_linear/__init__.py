"""A linear layer of few rows with its norm, gate and residual addition in Triton."""

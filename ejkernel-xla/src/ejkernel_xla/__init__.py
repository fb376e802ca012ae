"""ejkernel on XLA: every operation, on every device that JAX knows."""

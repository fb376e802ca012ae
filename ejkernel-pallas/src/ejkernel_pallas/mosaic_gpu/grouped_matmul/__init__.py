"""`grouped_matmul` on Hopper GPUs."""

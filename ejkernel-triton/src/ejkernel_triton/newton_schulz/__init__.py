"""Newton-Schulz iterations in Triton."""

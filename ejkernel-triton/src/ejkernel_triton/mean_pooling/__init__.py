"""Mean pooling in Triton."""

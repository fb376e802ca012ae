"""Float8 values in Triton."""

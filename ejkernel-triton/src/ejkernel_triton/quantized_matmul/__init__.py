"""Products with packed weights in Triton."""

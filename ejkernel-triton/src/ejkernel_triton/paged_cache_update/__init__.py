"""Writing into a paged cache in Triton."""

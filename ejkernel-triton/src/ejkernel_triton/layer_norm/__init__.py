"""Layer normalisation in Triton."""

"""Root-mean-square normalisation in Triton."""

"""The choice of blocks of native sparse attention in Triton."""

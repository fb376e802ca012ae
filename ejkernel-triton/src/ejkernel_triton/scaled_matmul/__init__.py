"""Products of int8 or float8 matrices in Triton."""

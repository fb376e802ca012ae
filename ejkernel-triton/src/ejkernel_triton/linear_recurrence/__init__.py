"""Linear recurrences of matrix states in Triton."""

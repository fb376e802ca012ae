"""Products of int8 or float8 matrices with scales of rows and columns."""

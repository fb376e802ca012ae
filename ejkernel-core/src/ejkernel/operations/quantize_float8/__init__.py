"""Arrays as float8 values and a scale."""

"""Code that the row operations share."""

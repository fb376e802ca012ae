"""Products with weights of a few bits."""

"""Score functions: what users write of one score, traced once and kept as data."""

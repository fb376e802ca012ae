"""Products of consecutive groups of rows with one matrix each, on TPU."""

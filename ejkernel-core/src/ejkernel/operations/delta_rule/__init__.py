"""States that are corrected towards each value before it is stored: the delta rule and its relatives."""

"""The delta rule and its relatives in Triton."""

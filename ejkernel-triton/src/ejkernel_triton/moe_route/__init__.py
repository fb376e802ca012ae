"""Choice of experts in Triton."""

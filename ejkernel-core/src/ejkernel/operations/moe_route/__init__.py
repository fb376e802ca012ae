"""Choice of experts for each token."""

"""What the operations over rows share."""

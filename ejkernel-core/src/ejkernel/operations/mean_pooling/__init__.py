"""Mean over a sequence."""

"""Next tokens drawn from logits."""

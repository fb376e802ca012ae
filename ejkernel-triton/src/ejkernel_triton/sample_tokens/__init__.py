"""Next tokens drawn from logits in Triton."""

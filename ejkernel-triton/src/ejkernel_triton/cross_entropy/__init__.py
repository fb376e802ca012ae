"""Cross entropy of logits in Triton."""

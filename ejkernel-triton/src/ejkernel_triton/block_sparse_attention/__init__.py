"""Block-sparse softmax attention in Triton."""

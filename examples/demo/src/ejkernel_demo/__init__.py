"""The demo: a small language model trained on real text with ejkernel's operations, and again without them."""

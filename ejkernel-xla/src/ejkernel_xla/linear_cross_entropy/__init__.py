"""Cross entropy of hidden states and the head on XLA, with the gradients formed in a forward that is differentiated."""

from ejkernel_xla.linear_cross_entropy.kernel import backward, forward

__all__ = ["backward", "forward"]

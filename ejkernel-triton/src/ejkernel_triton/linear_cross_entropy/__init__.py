"""Cross entropy of hidden states and the head in Triton, with the gradients formed in a forward that is differentiated."""

"""Cross entropy of hidden states and the head, summed over tokens."""

"""Root-mean-square normalisation of every head of queries and keys, and rotary position embedding of that."""

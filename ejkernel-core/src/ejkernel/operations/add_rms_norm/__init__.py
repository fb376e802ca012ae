"""The sum of a block's output and its residual stream, and the root-mean-square normalisation of that."""

"""Root-mean-square normalisation in blocks of rows."""

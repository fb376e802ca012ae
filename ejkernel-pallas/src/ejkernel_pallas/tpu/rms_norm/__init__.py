"""Root-mean-square normalisation on TPU."""

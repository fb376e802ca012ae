"""Writing into a paged cache on TPU."""

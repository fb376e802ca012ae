"""The tokens that sparse attention reads, chosen by a lightning indexer."""

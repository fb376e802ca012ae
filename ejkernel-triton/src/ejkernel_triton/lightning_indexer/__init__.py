"""The lightning indexer of sparse attention in Triton."""

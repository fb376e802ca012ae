"""Attention over sequences that are split over devices: blocks of keys and values go round a ring, or heads are exchanged."""

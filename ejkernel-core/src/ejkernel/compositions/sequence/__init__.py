"""Recurrences over sequences that are split over devices: every device runs its own tokens, and states pass between them."""

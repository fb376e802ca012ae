"""Linear attention with decays, and what else is a linear recurrence of matrix states."""

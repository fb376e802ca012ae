"""Candidates -> decision -> run, and `explain`."""

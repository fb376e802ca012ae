"""Config selection: which config an implementation runs with, and which tier said so."""

"""Orthogonalisation of matrices by Newton-Schulz iterations, as Muon uses it."""

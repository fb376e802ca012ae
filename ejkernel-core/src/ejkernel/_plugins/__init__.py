"""Plugins: discovery, validation, records, the registry, and a catalog of names."""

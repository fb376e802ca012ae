"""Selective scan of Mamba."""

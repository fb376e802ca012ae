"""Loads the conformance kit's options."""

pytest_plugins = ["ejkernel.testing.plugin"]

"""The conformance kit's options and fixtures."""

pytest_plugins = ["ejkernel.testing.plugin"]

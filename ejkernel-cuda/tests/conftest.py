"""The conformance suite's options and fixtures; without `--ejkernel-platform` its suite runs nothing."""

pytest_plugins = ["ejkernel.testing.plugin"]

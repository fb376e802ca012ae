"""The conformance suite, which adds the option `--ejkernel-platform` and its fixtures."""

pytest_plugins = ["ejkernel.testing.plugin"]

"""The conformance suite against this distribution; runs with `--ejkernel-platform=xla`."""

from ejkernel.testing.suite import *

"""Transforms and devices of the conformance suite; runs with `--ejkernel-platform=opaque`."""

from ejkernel.testing.suite.devices import *  # noqa: F403
from ejkernel.testing.suite.transforms import *  # noqa: F403

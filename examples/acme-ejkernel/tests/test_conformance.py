"""Everything that ejkernel asks of a platform: `pytest --ejkernel-platform=acme`."""

from ejkernel.testing.suite import *

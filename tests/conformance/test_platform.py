"""The conformance kit on an installed platform.

pytest --ejkernel-platform=xla tests/conformance
"""

from ejkernel.testing.suite import *

"""The conformance suite on an installed platform.

pytest --ejkernel-platform=xla tests/conformance
"""

from ejkernel.testing.suite import *

"""The conformance suite on an installed platform.

pytest -p ejkernel.testing.plugin --ejkernel-platform=xla tests/conformance
"""

from ejkernel.testing.suite import *

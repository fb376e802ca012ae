"""The conformance suite: `from ejkernel.testing.suite import *` in a test module collects every level."""

from ejkernel.testing.suite.causality import *
from ejkernel.testing.suite.contract import *
from ejkernel.testing.suite.devices import *
from ejkernel.testing.suite.numbers import *
from ejkernel.testing.suite.packaging import *
from ejkernel.testing.suite.replicated import *
from ejkernel.testing.suite.transforms import *

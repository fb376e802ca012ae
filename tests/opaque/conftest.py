"""A platform whose kernels XLA cannot look into: the XLA implementations, declared opaque.

What stands between such a kernel and a mesh is core alone, so the transforms and devices of the conformance suite are run on it.
"""

from __future__ import annotations

from ejkernel import kernel_registry
from ejkernel.plugin import resolve

for _candidate in kernel_registry.list_implementations():
    _known = _candidate.implementation
    if _candidate.platform == "xla" and not _known.variant:
        kernel_registry.register(
            _known.operation, "opaque", priority=-1, phase=_known.phase, configs=_known.configs, partitioning="opaque"
        )(resolve(_known.target))

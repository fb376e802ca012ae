"""A platform whose kernels XLA cannot look into: the XLA implementations, declared opaque, their lowered code kept on disk.

What stands between such a kernel and a mesh is core alone, so the transforms and devices of the conformance suite are run on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ejkernel import kernel_registry
from ejkernel._plugins.records import Candidate
from ejkernel.plugin import Implementation


def lowered_from() -> str:
    return "opaque"


for _candidate in kernel_registry.list_implementations():
    _known = _candidate.implementation
    if _candidate.platform == "xla" and not _known.variant:
        _opaque = Implementation(
            _known.operation, _known.target, _known.phase, configs=_known.configs, priority=-1, lowered_from=lowered_from
        )
        kernel_registry._add(Candidate("opaque", _opaque, "(this process)", "", "registered"))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield

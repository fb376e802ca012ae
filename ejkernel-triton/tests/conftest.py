"""A cache of compiled kernels that is nobody else's."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield

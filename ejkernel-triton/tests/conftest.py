"""Kernels without a GPU: interpreted, or recorded and compiled ahead of time, with a cache that is nobody else's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ejkernel_triton._interpret import INTERPRET
from ejkernel_triton._jax_triton import intercept_launches

if TYPE_CHECKING:
    from ejkernel_triton.testing import Recorder


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that a test launches run in Triton's interpreter, there and then."""
    from ejkernel_triton.testing import interpreted_call  # needs triton, without which these tests are skipped

    monkeypatch.setenv(INTERPRET, "1")
    with intercept_launches(interpreted_call):
        yield


@pytest.fixture
def triton_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests compile of equal kernels is compiled once in a run, whichever of its processes asks."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


@pytest.fixture
def recorder(triton_cache: None) -> Iterator[Recorder]:
    """What a test launches is recorded, to be compiled."""
    from ejkernel_triton.testing import Recorder  # as above

    with intercept_launches(made := Recorder()):
        yield made

"""Runs the command line in this process, under JAX's own settings, as optax promotes dtypes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from command_line import answer, use_own_settings


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_settings(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    """Run a command line."""
    return functools.partial(answer, capsys)

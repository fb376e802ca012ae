"""Runs the command line in this process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from command_line import answer, use_own_settings


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_settings(tmp_path, monkeypatch)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    """Run a command line."""
    return functools.partial(answer, capsys)

"""What tests of commands share, whichever distribution they come with: settings of their own, and what a command line answers."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ejkernel.cli import main


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one command line answered."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def mistake(self) -> str:
        """The one line on stderr, and nothing on stdout."""
        assert (self.status, self.out, self.err.count("\n")) == (2, "", 1), self
        return self.err.removeprefix("ejkernel: ").rstrip()


def use_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside, a cache of the test's own, and a console of 120 columns."""
    for name in list(os.environ):
        if name.startswith("EJKERNEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """Run a command line in this process."""
    status = main(arguments)
    captured = capsys.readouterr()
    return Answer(status, captured.out, captured.err)

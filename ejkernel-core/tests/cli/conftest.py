"""Runs the command line: in this process, or in a fresh one with made-up distributions."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
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


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("EJKERNEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    """Run a command line in this process."""

    def run(*arguments: str) -> Answer:
        status = main(arguments)
        captured = capsys.readouterr()
        return Answer(status, captured.out, captured.err)

    return run


@pytest.fixture
def fresh_cli(site: Any):
    """Run a command line in a new interpreter that sees the made-up distributions first."""

    def run(*arguments: str, **environment: str) -> Answer:
        path = os.pathsep.join(filter(None, (str(site.path), os.environ.get("PYTHONPATH", ""))))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", "import sys; from ejkernel.cli import main; sys.exit(main())", *arguments],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
            cwd=site.path,
            capture_output=True,
            text=True,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run

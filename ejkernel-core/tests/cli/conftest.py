"""Runs the command line: in this process, or in a fresh one with made-up distributions."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Answer, answer, use_own_settings


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_settings(tmp_path, monkeypatch)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    """Run a command line in this process."""
    return functools.partial(answer, capsys)


@pytest.fixture
def fresh_cli(site: Any):
    """Run a command line in a new interpreter that sees the made-up distributions first."""

    def run(*arguments: str, **environment: str) -> Answer:
        path = os.pathsep.join(filter(None, (str(site.path), os.environ.get("PYTHONPATH", ""))))
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                "import sys; from ejkernel_launcher import main; sys.exit(main())",
                *arguments,
            ],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
            cwd=site.path,
            capture_output=True,
            text=True,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run

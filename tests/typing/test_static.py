"""What static checkers tell users: nothing of right calls, and of wrong ones the line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import ejkernel

HERE = Path(__file__).parent
SCRIPTS = ("correct.py", "mistakes.py")
Reports = dict[str, set[int]]
"""Lines that a checker reports of each script."""


@pytest.fixture(scope="module", params=("pyright", "mypy"))
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """With the checker's default settings, in a folder without any of ours."""
    checker = request.param
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed; nox installs it for the session types")
    folder = tmp_path_factory.mktemp(checker)
    for name in SCRIPTS:
        (folder / name).write_text((HERE / name).read_text())
    return {"pyright": of_pyright, "mypy": of_mypy}[checker](folder)


def of_pyright(folder: Path) -> Reports:
    written = output_of(folder, ("pyright", "--outputjson", "--pythonpath", sys.executable, "."))
    assert written.startswith("{"), written
    diagnostics = json.loads(written)["generalDiagnostics"]
    return by_script((Path(found["file"]).name, found["range"]["start"]["line"] + 1) for found in diagnostics)


def of_mypy(folder: Path) -> Reports:
    """Of these scripts alone; mypy does not look where Python finds what is not installed."""
    found = {"MYPYPATH": str(Path(ejkernel.__file__).parent.parent)} if "site-packages" not in ejkernel.__file__ else {}
    command = ("mypy", "--output", "json", "--follow-imports", "silent", "--cache-dir", str(folder / "cache"), *SCRIPTS)
    written = output_of(folder, command, found)
    assert all(line.startswith("{") for line in written.splitlines()), written
    diagnostics = map(json.loads, written.splitlines())
    return by_script((Path(found["file"]).name, found["line"]) for found in diagnostics)


def output_of(folder: Path, command: Iterable[str], environment: dict[str, str] | None = None) -> str:
    arguments, variables = (sys.executable, "-m", *command), os.environ | (environment or {})
    done = subprocess.run(arguments, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


def by_script(lines: Iterable[tuple[str, int]]) -> Reports:
    found: Reports = {name: set() for name in SCRIPTS}
    for name, line in lines:
        found[name].add(line)
    return found


def test_every_mistake_is_reported(reports):
    planted = {
        number for number, line in enumerate((HERE / "mistakes.py").read_text().splitlines(), 1) if line.endswith("# mistake")
    }
    assert len(planted) >= 20
    assert reports["mistakes.py"] == planted


def test_right_calls_are_not_reported(reports):
    calls = [line for line in (HERE / "correct.py").read_text().splitlines() if "ejkernel." in line or "(" in line]
    assert len(calls) >= 60
    assert not reports["correct.py"]

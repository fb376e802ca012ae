"""What a static checker tells users: nothing of right calls, and of wrong ones the line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Lines that pyright reports, with its words, of each script; with its default settings, in a folder without any of ours."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed; nox installs it for the session types")
    folder = tmp_path_factory.mktemp("user")
    for name in ("correct.py", "mistakes.py"):
        (folder / name).write_text((HERE / name).read_text())
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    found: dict[str, dict[int, str]] = {"correct.py": {}, "mistakes.py": {}}
    for report in json.loads(done.stdout)["generalDiagnostics"]:
        found[Path(report["file"]).name][report["range"]["start"]["line"] + 1] = report["message"]
    return found


def test_every_mistake_is_reported(reports):
    planted = {
        number for number, line in enumerate((HERE / "mistakes.py").read_text().splitlines(), 1) if line.endswith("# mistake")
    }
    assert len(planted) >= 20
    assert {*reports["mistakes.py"]} == planted


def test_right_calls_are_not_reported(reports):
    calls = [line for line in (HERE / "correct.py").read_text().splitlines() if "ejkernel." in line or "(" in line]
    assert len(calls) >= 60
    assert not reports["correct.py"]

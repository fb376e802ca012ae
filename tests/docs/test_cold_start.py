"""The commands of docs/cold_start.md compile kernels."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ejkernel.cli import _commands
from ejkernel.cli._entry import main

PAGE = Path(__file__).parents[2] / "docs" / "cold_start.md"


def test_commands(tmp_path, monkeypatch, capfd):
    pytest.importorskip("jax_triton", reason="kernels are compiled by jax-triton")
    command = _commands.Command("compile", "ejkernel-triton", "0", "ejkernel_triton._compile:compile_kernels")
    monkeypatch.setattr(_commands, "found_commands", lambda built_in: (command,))
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "step.py").write_text(program)
    (shapes,) = re.findall(r"the calls of a file, `(.*?)`", text)
    (tmp_path / "shapes.json").write_text(shapes)
    commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("ejkernel ")]
    assert len(commands) == 3
    for arguments in commands:
        assert main([*arguments, "--jobs", "2", "--json"]) == 0
        document = json.loads(capfd.readouterr().out)
        assert document["kernels"] and not any(one["error"] for one in document["programs"])

"""The program itself: version, help, mistakes, missing packages, the settings table."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import ejkernel
from ejkernel._plugins.settings import VARIABLES, read_settings, unknown_settings
from ejkernel.utils.known_versions import matching


def test_version(cli):
    assert cli("--version").out == version("ejkernel-core") + "\n"


def test_help_names_every_command(cli):
    answer = cli()
    assert answer.status == 0
    for command in ("doctor", "list", "explain", "tune", "cache"):
        assert f"  {command} " in answer.out


def test_the_module_ends_with_the_status_of_the_command():
    done = subprocess.run([sys.executable, "-m", "ejkernel", "explain", "no_such_operation"], capture_output=True, check=False)
    assert done.returncode == 2


def test_group_without_command_shows_its_help(cli):
    assert "export" in cli("cache").out


def test_missing_packages_are_one_sentence(cli, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else find(name))
    assert cli("list").mistake == 'the command line needs typer; install them with: pip install "ejkernel-core[cli]"'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("lst",), "No such command 'lst'"),
        (("list", "--plat"), "No such option"),
        (("explain",), "Missing argument"),
        (("tune", "softmax", "--rounds", "many"), "Invalid value for '--rounds'"),
        (("tune", "softmax", "--rounds", "0"), "Invalid value for '--rounds'"),
    ],
)
def test_mistakes_are_one_line(cli, arguments: tuple[str, ...], expected: str):
    assert expected in cli(*arguments).mistake


def test_every_variable_that_the_code_reads_is_in_the_table():
    sources = Path(ejkernel.__file__).parent.rglob("*.py")
    read = {name for source in sources for name in re.findall(r"EJKERNEL_[A-Z_]*[A-Z]", source.read_text())}
    assert read == {variable.name for variable in VARIABLES}


def test_settings_say_where_they_come_from():
    settings = {s.variable.name: (s.value, s.source) for s in read_settings({"EJKERNEL_PLUGINS": ""})}
    assert settings["EJKERNEL_PLUGINS"] == ("", "environment")
    assert settings["EJKERNEL_FORBID"] == (None, "default")


def test_unknown_variables_get_a_hint():
    found = unknown_settings({"EJKERNEL_PLATFROM": "xla", "EJKERNEL_STRICT": "1", "OTHER": "2"})
    assert found == {"EJKERNEL_PLATFROM": "did you mean 'EJKERNEL_PLATFORM'?"}


@pytest.mark.parametrize(
    ("installed", "verdicts"),
    [
        ({"jax": "0.12.0.1", "jax-triton": "0.4.1"}, ["bad"]),
        ({"jax": "0.11.2", "jax-triton": "0.3.1", "triton": "3.6.0"}, ["good", "good"]),
        ({"jax": "0.12.0.1", "jax-triton": "0.3.1", "triton": "3.9.0"}, ["good"]),
        ({"jax": "0.11.2", "jax-triton": "0.4.1", "triton": "3.6.0"}, ["bad"]),
        ({"jax": "0.11.2", "jax-triton": "0.4.1"}, []),
        ({"jax": "0.12.0.1"}, []),
    ],
)
def test_measured_combinations(installed: dict[str, str], verdicts: list[str]):
    assert [combination.verdict for combination in matching(installed)] == verdicts

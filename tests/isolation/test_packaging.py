"""The distributions agree with each other, and their wheels hold what they should and nothing else."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email.parser import Parser

import pytest

import ejkernel
from ejkernel.plugin import FIRST_PARTY

CLASSIFIERS = {"Typing :: Typed", *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13))}


def test_versions_in_lockstep(distribution, root):
    core = tomllib.loads((root / "ejkernel-core" / "pyproject.toml").read_text())["project"]["version"]
    assert distribution.project["version"] == core == ejkernel.__version__
    assert f"## {core}" in (root / "CHANGELOG.md").read_text()


def test_siblings_are_pinned(distribution):
    major, minor, _ = map(int, distribution.project["version"].split("."))
    siblings = [requirement for requirement in distribution.project["dependencies"] if requirement.startswith("ejkernel-")]
    expected = f"ejkernel-core>={major}.{minor},<{major}.{minor + 1}"
    assert siblings == ([] if distribution.name == "ejkernel-core" else [expected])


def test_entry_point(distribution):
    declared = distribution.project.get("entry-points", {}).get("ejkernel.plugins", {})
    names = {name: owner for name, owner in FIRST_PARTY.items() if owner == distribution.name}
    assert declared == dict.fromkeys(names, f"{distribution.package}._plugin")


def test_metadata(distribution, root):
    project = distribution.project
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert set(project["classifiers"]) >= CLASSIFIERS
    assert (distribution.path / "README.md").read_text().startswith(f"# {distribution.name}\n")
    assert (distribution.path / "LICENSE").read_text() == (root / "LICENSE").read_text()
    assert (distribution.path / "src" / distribution.package / "py.typed").is_file()


def test_core_extras(root):
    extras = tomllib.loads((root / "ejkernel-core" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.match(r"[\w-]+", item)[0] for item in items} for extra, items in extras.items()}
    assert names == {
        "bench": {"matplotlib", "rich", "typer"},
        "cli": {"matplotlib", "rich", "typer"},
        "testing": {"flatbuffers", "hypothesis", "pytest"},
    }


def test_wheel(distribution, wheel):
    with zipfile.ZipFile(wheel(distribution.path)) as archive:
        names = archive.namelist()
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert {name.partition("/")[0] for name in names} == {distribution.package, info}
    assert f"{distribution.package}/py.typed" in names
    assert any(re.fullmatch(rf"{re.escape(info)}/(licenses/)?LICENSE", name) for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name or name.endswith((".pyc", ".cu", ".cc"))]
    source = distribution.path / "src" / distribution.package
    python = {f"{distribution.package}/{file.relative_to(source).as_posix()}" for file in source.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == python
    assert metadata["Name"] == distribution.name
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "noxfile.py", ".ci/run"])
def test_files_of_the_repository(root, name):
    assert (root / name).stat().st_size > 0

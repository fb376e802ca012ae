"""The distributions agree with each other, and their wheels hold what they should and nothing else."""

from __future__ import annotations

import ast
import re
import tomllib
import zipfile
from email.parser import Parser

import pytest
from packaging.version import Version

import ejkernel
from ejkernel.cli._commands import OWNERS
from ejkernel.plugin import FIRST_PARTY
from ejkernel.utils.known_versions import TESTED_JAX, untested_jax

CLASSIFIERS = {"Typing :: Typed", *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13))}

AUTHORS = re.compile(r"^  - name: (.+)$", re.MULTILINE)


def test_versions_in_lockstep(distribution, root):
    core = tomllib.loads((root / "ejkernel-core" / "pyproject.toml").read_text())["project"]["version"]
    assert distribution.project["version"] == core == ejkernel.__version__
    assert f"## {core}" in (root / "CHANGELOG.md").read_text()


def test_siblings_are_pinned(distribution):
    major, minor, _ = map(int, distribution.project["version"].split("."))
    siblings = [requirement for requirement in distribution.project["dependencies"] if requirement.startswith("ejkernel-")]
    extra = "[cli]" if distribution.name in OWNERS.values() else ""
    versions = f">={major}.{minor},<{major}.{minor + 1}"
    assert siblings == ([] if distribution.name == "ejkernel-core" else [f"ejkernel-core{extra}{versions}"])
    extras = [item for items in distribution.project.get("optional-dependencies", {}).values() for item in items]
    assert all(item.endswith(versions) for item in extras if item.startswith("ejkernel-"))


def test_entry_points(distribution):
    declared = distribution.project.get("entry-points", {})
    names = [name for name, owner in FIRST_PARTY.items() if owner == distribution.name]
    assert declared.get("ejkernel.plugins", {}) == dict.fromkeys(names, f"{distribution.package}._plugin")
    commands = {name for name, owner in OWNERS.items() if owner == distribution.name}
    assert declared.get("ejkernel.commands", {}).keys() == commands


def test_metadata(distribution, root):
    project = distribution.project
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert set(project["classifiers"]) >= CLASSIFIERS
    assert project.get("urls", {}) == tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ejkernel"]["urls"]
    assert [author["name"] for author in project["authors"]] == AUTHORS.findall((root / "CITATION.cff").read_text())
    description = (distribution.path / "README.md").read_text()
    assert description.startswith(f"# {distribution.name}\n")
    assert all(target.startswith(("https://", "#")) for target in re.findall(r"\]\(([^)\s]+)\)", description))
    assert (distribution.path / "LICENSE").read_text() == (root / "LICENSE").read_text()
    assert (distribution.path / "src" / distribution.package / "py.typed").is_file()


def test_core_extras(root):
    extras = tomllib.loads((root / "ejkernel-core" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.match(r"[\w-]+", item)[0] for item in items} for extra, items in extras.items()}
    assert names == {
        "cli": {"rich", "typer"},
        "cpu": {"ejkernel-xla"},
        "cuda12": {"ejkernel-pallas", "ejkernel-triton", "ejkernel-xla", "jax"},
        "cuda13": {*FIRST_PARTY.values(), "jax"},
        "testing": {"beartype", "hypothesis", "pytest"},
        "tpu": {"ejkernel-pallas", "ejkernel-xla", "jax"},
    }


def test_jax_is_bounded_by_what_is_tested(root):
    """By the minor release after the newest one, in core and wherever a distribution of ours bounds it too."""
    pairs = ast.literal_eval(re.search(r"^PAIRS = (.+)$", (root / "noxfile.py").read_text(), re.MULTILINE)[1])
    tested = sorted((Version(jax) for _, jax in pairs))
    assert tuple(map(Version, TESTED_JAX)) == (tested[0], tested[-1])
    bounds = f"jax>={tested[0]},<0.{tested[-1].minor + 1}"
    projects = [tomllib.loads(path.read_text())["project"] for path in root.glob("ejkernel-*/pyproject.toml")]
    found = {(one["name"], item) for one in projects for item in one["dependencies"] if re.match(r"jax[<>=]", item)}
    assert found == {("ejkernel-core", bounds), ("ejkernel-triton", bounds)}
    assert untested_jax(str(tested[0])) == untested_jax(str(tested[1])) == untested_jax(str(tested[-1])) == ""
    assert untested_jax("0.12.1") == "jax 0.12.1 is newer than what ejkernel is tested with, 0.10.2 to 0.12.0.1"
    assert "older" in untested_jax("0.9")


def test_what_the_library_holds_of_others_is_named(root):
    """Every header that is no C++ standard's and not ours, and every library that is linked statically."""
    library = root / "ejkernel-cuda"
    sources = [path.read_text() for path in (library / "csrc").rglob("*") if path.is_file()]
    included = {name for text in sources for name in re.findall(r"#include [<\"]([^>\"]+)[>\"]", text)}
    folders = (library / "csrc", library / "tests" / "host")  # the latter for tests that run kernels on the host
    ours = {path.relative_to(folder).as_posix() for folder in folders for path in folder.rglob("*.*h")}
    notices = (library / "THIRD_PARTY_NOTICES.md").read_text()
    named = {*re.findall(r"`([^`]+)`", notices)}
    foreign = {name for name in included - ours if "." in name}
    assert {"cuda_runtime.h", "xla/ffi/api/ffi.h"} <= foreign
    assert {name for name in foreign if name not in named and name.rpartition("/")[0] not in named} == set()
    recipe = (library / "CMakeLists.txt").read_text()
    assert "target_link_libraries" not in recipe, "name what is linked in THIRD_PARTY_NOTICES.md, and here"
    assert ("CMAKE_CUDA_RUNTIME_LIBRARY Static" in recipe) == ("`cudart_static`" in notices)
    jaxlib = tomllib.loads((library / "pyproject.toml").read_text())["build-system"]["requires"]
    assert next(item for item in jaxlib if item.startswith("jaxlib==")).replace("==", " ") in notices


def test_wheel(distribution, wheel):
    with zipfile.ZipFile(wheel(distribution.path)) as archive:
        names = archive.namelist()
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    launcher = {"ejkernel_launcher.py"} & {file.name for file in (distribution.path / "src").iterdir()}
    assert {name.partition("/")[0] for name in names} == {distribution.package, info, *launcher}
    assert f"{distribution.package}/py.typed" in names
    for file in distribution.project["license-files"]:
        assert any(re.fullmatch(rf"{re.escape(info)}/(licenses/)?{re.escape(file)}", name) for name in names), file
    assert ("THIRD_PARTY_NOTICES.md" in distribution.project["license-files"]) == (distribution.name == "ejkernel-cuda")
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name or name.endswith((".pyc", ".cu", ".cc"))]
    source = distribution.path / "src" / distribution.package
    python = {f"{distribution.package}/{file.relative_to(source).as_posix()}" for file in source.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == python | launcher
    assert metadata["Name"] == distribution.name
    assert metadata["License-Expression"] == "Apache-2.0"


def test_core_is_small(root, wheel):
    """No corpus, no page, no plots and no kernels of others: what few need is in distributions of its own."""
    built = wheel(root / "ejkernel-core")
    assert built.stat().st_size <= 825_000
    with zipfile.ZipFile(built) as archive:
        modules = [name for name in archive.namelist() if name.startswith("ejkernel/")]
        sources = {name: archive.read(name).decode() for name in modules}
    assert {name for name in modules if not name.endswith(".py")} == {"ejkernel/py.typed"}
    foreign = re.compile(r"^\s*(?:import|from) +(matplotlib|torch|tokamax|ejkernel_\w+)\b", re.MULTILINE)
    assert {name: found[1] for name, text in sources.items() if (found := foreign.search(text))} == {}


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "noxfile.py", ".ci/run"])
def test_files_of_the_repository(root, name):
    assert (root / name).stat().st_size > 0

"""Fixtures shared by the tests across distributions: the tree, its distributions, and wheels built from it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = (
    *("ejkernel-core", "ejkernel-xla", "ejkernel-triton", "ejkernel-pallas", "ejkernel-cuda"),
    *("benchmarks", "examples/demo"),
)
"""Their folders."""


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A distribution's source directory and its pyproject."""

    path: Path

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def package(self) -> str:
        return "ejkernel" if self.name == "ejkernel-core" else self.name.replace("-", "_")

    @property
    def toml(self) -> dict[str, Any]:
        return tomllib.loads((self.path / "pyproject.toml").read_text())

    @property
    def project(self) -> dict[str, Any]:
        return self.toml["project"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def site() -> Path:
    """The documentation site, built now; a warning is an error."""
    pytest.importorskip("zensical", reason="needs zensical and mkdocstrings; run nox -s site")
    command = [sys.executable, str(ROOT / "tools" / "build_site.py")]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:]
    assert not re.findall(r"^(?:griffe|mkdocstrings).*", result.stdout, re.MULTILINE)
    return ROOT / "build" / "site" / "html"


@pytest.fixture(params=DISTRIBUTIONS)
def distribution(request: pytest.FixtureRequest) -> Distribution:
    """Each distribution of the repository."""
    path = ROOT / request.param
    assert (path / "pyproject.toml").is_file(), f"{request.param} has no pyproject.toml"
    return Distribution(path)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Build the wheel of a source directory, once per session."""
    target = tmp_path_factory.mktemp("wheels")
    built: dict[Path, Path] = {}

    def build(source: Path) -> Path:
        if source not in built:
            toml = tomllib.loads((source / "pyproject.toml").read_text())
            native = "scikit_build_core" in toml["build-system"]["build-backend"]
            if native and shutil.which("nvcc") is None:
                pytest.skip(f"the wheel of {source.name} needs nvcc on PATH")
            out = target / source.name
            command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
            # A native one against the headers that it asks for, as it is published, but for one architecture: a third of the work.
            command += [] if native else ["--no-isolation", "--skip-dependency-check"]
            one = {"SKBUILD_CMAKE_DEFINE": "CMAKE_CUDA_ARCHITECTURES=80-virtual"}
            result = subprocess.run(command, env={**os.environ, **one}, capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stdout + result.stderr
            (built[source],) = out.glob("*.whl")
        return built[source]

    return build

"""Fresh virtual environments with wheels in them, as a user's machine would have."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this interpreter has installed, by symbolic links, without anything of ejkernel: saves installing jax each time."""
    target = tmp_path_factory.mktemp("dependencies")
    for directory in (Path(path) for path in sys.path if path.endswith("-packages")):
        for entry in directory.iterdir():
            ours = "ejkernel" in entry.name or entry.suffix == ".pth" or entry.name == "__pycache__"
            if not ours and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    assert (target / "jax").is_dir()
    return target


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def run(self, code: str, **environment: str) -> str:
        """Run code in a fresh process; every warning that is not expected is an error. Returns stdout and stderr."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("EJKERNEL_", "PYTHON"))}
        result = subprocess.run(
            [self.python, "-c", textwrap.dedent(code)],
            env={**inherited, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error", **environment},
            cwd=self.path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr


@pytest.fixture
def environment(tmp_path: Path, dependencies: Path, wheel: Callable[[Path], Path]) -> Callable[..., Environment]:
    """Make a fresh environment with the wheels of these source directories."""

    def make(*sources: Path) -> Environment:
        wheels = [str(wheel(source)) for source in sources]
        venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
        made = Environment(tmp_path / "venv")
        (packages,) = (made.path / "lib").glob("python*/site-packages")
        (packages / "dependencies.pth").write_text(f"{dependencies}\n")
        pip = [sys.executable, "-m", "pip", "--python", str(made.python), "--disable-pip-version-check"]
        command = [*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return made

    return make


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """Write the source directory of a made-up distribution with one plugin."""

    def write(distribution: str, platform: str, code: str) -> Path:
        path, package = tmp_path / distribution, distribution.replace("-", "_")
        (path / package).mkdir(parents=True)
        (path / package / "__init__.py").touch()
        (path / package / "_plugin.py").write_text(textwrap.dedent(code))
        (path / "pyproject.toml").write_text(
            textwrap.dedent(f"""\
                [build-system]
                requires = ["hatchling"]
                build-backend = "hatchling.build"
                [project]
                name = "{distribution}"
                version = "1.0"
                [project.entry-points."ejkernel.plugins"]
                {platform} = "{package}._plugin"
                """)
        )
        return path

    return write

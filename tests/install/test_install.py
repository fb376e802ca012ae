"""What pip chooses for a user works together: the newest releases that the metadata admits, in fresh environments."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = ("ejkernel-core", "ejkernel-xla", "ejkernel-triton", "ejkernel-pallas", "ejkernel-cuda")

PLATFORMS = {
    "cpu": {"ejkernel-xla"},
    "cuda12": {"ejkernel-xla", "ejkernel-triton", "ejkernel-pallas", "jax-triton", "triton", "jax-cuda12-plugin"},
    "cuda13": {
        *("ejkernel-xla", "ejkernel-triton", "ejkernel-pallas", "ejkernel-cuda"),
        *("jax-triton", "triton", "jax-cuda13-plugin"),
    },
    "tpu": {"ejkernel-xla", "ejkernel-pallas", "libtpu"},
}
"""What each extra of core brings beside core and JAX."""

LOWERED = """
import jax, jax.numpy as jnp, ejkernel
shape = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
attend = lambda q, k, v: ejkernel.flash_attention(q, k, v, causal=True, platform="triton").astype(jnp.float32).sum()
with ejkernel.use(target="gpu:9.0"):
    program = jax.jit(jax.grad(attend)).trace(shape, shape, shape).lower(lowering_platforms=("cuda",)).as_text()
assert program.count("triton") > 1, program[:2000]
assert [record.state for record in ejkernel.kernel_registry.records] == ["ok"], ejkernel.kernel_registry.records
"""


def command(*arguments: object, cwd: Path | None = None, **environment: str) -> str:
    """The output of a command, which must succeed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EJKERNEL_", "PYTHON"))}
    result = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> Path:
    """A folder with the wheels: a release, or made here, then that of the CUDA library holds its Python code only."""
    if "EJKERNEL_RELEASE" in os.environ:
        return Path(os.environ["EJKERNEL_RELEASE"])
    out = tmp_path_factory.mktemp("wheels")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", out)
    for name in DISTRIBUTIONS:
        command(*build, ROOT / name, SKBUILD_WHEEL_CMAKE="0")
    return out


def pythons() -> list[str]:
    """Supported versions of Python, as core's metadata names them."""
    classifiers = tomllib.loads((ROOT / "ejkernel-core" / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [one.rpartition(" ")[2] for one in classifiers if one.startswith("Programming Language :: Python :: 3.")]
    assert versions
    return versions


def interpreter(version: str) -> str:
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"python{version} is not found; put it on PATH")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        metafunc.parametrize("python", pythons(), indirect=True)


@pytest.fixture
def python(request, tmp_path) -> Path:
    """The Python of a fresh environment."""
    command(interpreter(request.param), "-m", "venv", tmp_path / "fresh")
    return tmp_path / "fresh" / "bin" / "python"


def pip(python, wheels, *arguments):
    return command(python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--find-links", wheels, *arguments)


def installed(python):
    return {one["name"]: one["version"] for one in json.loads(command(python, "-m", "pip", "list", "--format", "json"))}


def test_triton_lowers_attention_for_a_gpu(python, wheels):
    """Nothing but the names is said. JAX's CUDA part comes without CUDA itself: enough to lower on any machine."""
    pip(python, wheels, "ejkernel-core", "ejkernel-triton")
    jax = installed(python)["jax"]
    pip(python, wheels, "--no-deps", f"jax-cuda13-plugin=={jax}")
    command(python, "-c", LOWERED, JAX_PLATFORMS="cpu")


def test_a_folder_of_wheels_is_an_index(python, wheels):
    pip(python, wheels, "ejkernel-core[cpu,cli]")
    assert {"ejkernel-core", "ejkernel-xla"} == {name for name in installed(python) if name.startswith("ejkernel")}
    assert command(python.parent / "ejkernel", "doctor", JAX_PLATFORMS="cpu").endswith("Healthy.\n")


def test_the_first_line_of_the_page_works(python):
    """From a checkout, with no index or folder of ours."""
    page = (ROOT / "docs" / "install.md").read_text()
    line = re.search(r"`pip install (.+?)`", page)[1]
    assert f"pip install {line} " in (ROOT / "README.md").read_text()
    command(python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *shlex.split(line), cwd=ROOT)
    assert command(python.parent / "ejkernel", "doctor", JAX_PLATFORMS="cpu").endswith("Healthy.\n")


def test_extras_bring_whole_set_ups(python, wheels):
    for extra, wanted in PLATFORMS.items():
        report = json.loads(pip(python, wheels, "--dry-run", "--ignore-installed", "--report", "-", f"ejkernel-core[{extra}]"))
        chosen = {one["metadata"]["name"].lower().replace("_", "-"): one["metadata"]["version"] for one in report["install"]}
        ours = {name for name in chosen if name.startswith("ejkernel-")}
        assert wanted <= chosen.keys()
        assert ours - wanted == {"ejkernel-core"}
        parts = {version for name, version in chosen.items() if name in ("jax", "jaxlib") or name.startswith("jax-cuda")}
        assert len(parts) == 1, chosen

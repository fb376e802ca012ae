"""What people type in the root of a checkout works, or says in one sentence what to type instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, without: str = "") -> tuple[int, str]:
    """Status and output; of an interpreter that lacks these packages if `without` names a folder with a `sitecustomize`."""
    path = os.pathsep.join(filter(None, (without, os.environ.get("PYTHONPATH"))))
    found = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("arguments", [(), (".",)], ids=["bare", "everything"])
def test_pytest_collects(arguments: tuple[str, ...]):
    status, output = run("-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only", *arguments)
    assert status == 0, output[-3000:]
    folders = {line.partition("::")[0].rpartition("/")[0] for line in output.splitlines() if "::" in line}
    assert "tests/comparison" in folders
    assert not folders & {"tests/opaque", "tests/conformance", "examples/acme-ejkernel/tests"}


WITHOUT = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec
lacking = ("ejkernel_bench", "ejkernel_demo")
PathFinder.find_spec = classmethod(lambda cls, name, *where: None if name in lacking else found(name, *where))
"""
"""Python without the distributions of commands, as after CONTRIBUTING's set-up."""


@pytest.fixture
def without(tmp_path: Path) -> str:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    return str(tmp_path)


@pytest.mark.parametrize("arguments", [(), ("tests/",)], ids=["bare", "tests"])
def test_pytest_collects_without_the_distributions_of_commands(arguments: tuple[str, ...], without: str):
    status, output = run("-m", "pytest", "-p", "no:cacheprovider", "--collect-only", *arguments, without=without)
    assert status == 0, output[-3000:]
    assert "passed over: benchmarks/tests, which needs: pip install --editable ./benchmarks" in output
    assert "test_bench_table" not in output
    status, output = run("-m", "pytest", "-p", "no:cacheprovider", "benchmarks/tests", without=without)
    assert (status, output.strip()) == (
        4,
        "ERROR: benchmarks/tests needs ejkernel_bench; run: pip install --editable ./benchmarks",
    )


@pytest.mark.parametrize(("folder", "platform"), [("tests/opaque", "opaque"), ("tests/conformance", "xla")])
def test_suites_of_one_platform_ask_for_it(folder: str, platform: str):
    status, output = run("-m", "pytest", "-p", "no:cacheprovider", folder)
    assert (status, output.strip()) == (4, f"ERROR: {folder} is run on one platform; add --ejkernel-platform={platform}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--comparison", "-k", "softmax"), "2 passed"),
        (("--xla", "-k", "test_angles", "--verbose", "--failfast"), "test_rope.py::test_angles PASSED"),
        (("--triton", "-k", "test_version", "--", "--collect-only"), "ejkernel-triton/tests/test_versions.py"),
    ],
    ids=["comparison", "xla", "triton"],
)
def test_runner(arguments: tuple[str, ...], expected: str):
    status, output = run("test/run_tests.py", *arguments)
    assert status == 0, output[-3000:]
    assert expected in output


def test_runner_without_what_it_needs():
    """In an interpreter that sees no installed packages."""
    status, output = run("-I", "-S", "test/run_tests.py", "--xla")
    assert status == 2
    assert output.startswith("pytest, ejkernel, ejkernel_xla, ejkernel_triton cannot be imported; run pip install -e")
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("how", [("--editable", ".[dev]"), (".",)], ids=["editable", "plain"])
def test_the_root_says_what_to_install(how: tuple[str, ...]):
    status, output = run("-m", "pip", "install", "--no-deps", *how)
    assert status != 0
    (said,) = {line.strip() for line in output.splitlines() if "for development run:" in line}
    assert said.startswith("The root of this repository is not a distribution; ")
    assert "[1 lines of output]" in output
    for path in [word.strip('"').partition("[")[0] for word in said.split() if word.strip('"').startswith("./")]:
        assert (ROOT / path / "pyproject.toml").is_file(), path

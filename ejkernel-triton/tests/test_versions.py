"""The plugin's plugin module and what it says about versions."""

from __future__ import annotations

import collections
import importlib
import pathlib
import subprocess
import sys

import pytest

import ejkernel  # noqa: F401 - discovery first: a plugin module is imported by it
from ejkernel.utils.known_versions import matching
from ejkernel_triton import _plugin, _versions


def problem(jax, jax_triton, triton="3.6.0"):
    return _versions.problem_of({"jax": jax, "jax-triton": jax_triton, "triton": triton})


BAD = [("0.12.0.1", "0.4.1", "3.9.0"), ("0.12.0", "0.4.0", "3.7.1"), ("0.11.2", "0.4.1", "3.6.0"), ("0.10.2", "0.4.0", "3.6.0")]
GOOD = [
    *[(jax, "0.3.1", triton) for jax in ("0.10.2", "0.11.0", "0.11.2", "0.12.0", "0.12.0.1") for triton in ("3.6.0", "3.7.1")],
    *[(jax, "0.3.1", triton) for jax in ("0.10.2", "0.11.2", "0.12.0.1") for triton in ("3.8.0", "3.9.0")],
    *[("0.11.2", jax_triton, triton) for jax_triton in ("0.4.0", "0.4.1") for triton in ("3.7.1", "3.9.0")],
]


@pytest.mark.parametrize(("jax", "jax_triton", "triton"), BAD)
def test_what_is_known_to_be_broken_is_one_sentence(jax, jax_triton, triton):
    said = problem(jax, jax_triton, triton)
    assert f"jax-triton {jax_triton}" in said and 'pip install "jax-triton==0.3.1"' in said
    assert f"jax {jax}" in said or f"triton {triton}" in said
    assert "\n" not in said


@pytest.mark.parametrize(("jax", "jax_triton", "triton"), GOOD)
def test_what_is_known_to_work(jax, jax_triton, triton):
    assert problem(jax, jax_triton, triton) is None
    known = matching({"jax": jax, "jax-triton": jax_triton, "triton": triton})
    assert {combination.verdict for combination in known} == {"good"}


def test_what_was_never_measured_is_tried():
    assert problem("0.11.0", "0.9.9") is None
    assert matching({"jax": "0.11.0", "jax-triton": "0.9.9", "triton": "3.6.0"}) == ()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(_versions, "_version", lambda name: None if name == "triton" else "1.0")
    _versions.installed.cache_clear()
    try:
        assert _versions.version_problem.__wrapped__() == "triton not installed: pip install triton"
    finally:
        _versions.installed.cache_clear()


def test_jax_without_its_cuda_part_is_one_sentence(monkeypatch):
    monkeypatch.setattr(_versions, "installed", lambda: {"jax": "0.11.2", "jax-triton": "0.3.1", "triton": "3.6.0"})
    monkeypatch.setattr(_versions, "_has_gpu_support", lambda: False)
    problem = _versions.version_problem.__wrapped__()
    assert "CUDA" in problem and "pip install" in problem and "\n" not in problem
    monkeypatch.setattr(_versions, "_has_gpu_support", lambda: True)
    assert _versions.version_problem.__wrapped__() is None


def test_cuda_part_is_looked_for_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "jax_cuda_other.py").touch()
    assert not _versions._has_gpu_support()
    (tmp_path / "jax_cuda13_plugin").mkdir()
    (tmp_path / "jax_cuda13_plugin" / "__init__.py").touch()
    assert _versions._has_gpu_support()


FOLDERS = {
    path.parent.name for path in pathlib.Path(_plugin.__file__).parent.glob("*/capability.py") if path.parent.name[0] != "_"
}


@pytest.mark.tree
def test_every_folder_of_an_operation_is_declared_once():
    declared = collections.defaultdict(list)
    for implementation in _plugin.ejkernel_plugin().implementations:
        declared[implementation.operation].append(implementation.phase)
    assert declared.keys() == FOLDERS
    for operation, phases in declared.items():
        written = importlib.import_module(f"ejkernel_triton.{operation}.capability")
        assert phases == [phase for phase in ("forward", "backward") if hasattr(written, f"supports_{phase}")], operation
    assert all(phases[0] == "forward" for phases in declared.values())


def test_light_module_imports_nothing_heavy():
    code = (
        "import sys, ejkernel, ejkernel_triton._plugin as p; p.ejkernel_plugin(); "
        "print([m for m in ('jax_triton', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_doctor_is_told_where_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_TRITON_INTERPRET", "1")
    findings = {}
    _plugin.ejkernel_diagnose(findings.__setitem__)
    if _versions.version_problem() is None:
        assert findings["compiled kernels"] == f"kept in {tmp_path / 'kernels-triton'}"
    else:
        assert "jax-triton" in findings["compiled kernels"]
    assert "EJKERNEL_TRITON_INTERPRET" in findings["interpreter"]

"""The plugin's light module and what it says about versions."""

from __future__ import annotations

import subprocess
import sys

import ejkernel  # noqa: F401 - discovery first: a light module is imported by it
from ejkernel_triton import _plugin, _versions


def test_known_bad_pair_is_one_sentence():
    problem = _versions.problem_of("0.12.0.1", "0.4.1")
    assert "0.4.1" in problem and "0.12.0.1" in problem and "install" in problem
    assert "\n" not in problem


def test_known_good_and_unknown_pairs_are_tried():
    assert _versions.problem_of("0.11.2", "0.3.1") is None
    assert _versions.problem_of("0.11.0", "0.9.9") is None


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


def test_plugin_record():
    plugin = _plugin.ejkernel_plugin()
    phases = {}
    for implementation in plugin.implementations:
        phases.setdefault(implementation.operation, []).append(implementation.phase)
    assert set(phases) == {"layer_norm", "mean_pooling", "rms_norm", "rope", "softmax"}
    assert all(found == ["forward", "backward"] for found in phases.values())


def test_light_module_imports_nothing_heavy():
    code = (
        "import sys, ejkernel, ejkernel_triton._plugin as p; p.ejkernel_plugin(); "
        "print([m for m in ('jax_triton', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

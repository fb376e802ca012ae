"""What every operation's `supports` shares, and the dtype rules of kernels."""

from __future__ import annotations

import pytest

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel_triton import _capability
from ejkernel_triton._interpret import INTERPRET
from ejkernel_triton._numerics import dot_precision

H200 = Target("gpu", "NVIDIA H200", "9.0")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """A machine whose versions work together, without the interpreter."""
    monkeypatch.delenv(INTERPRET, raising=False)
    monkeypatch.setattr(_capability, "version_problem", lambda: None)


@pytest.mark.parametrize(
    ("precision", "dtype", "wanted"),
    [
        (None, "float32", "ieee"),
        ("highest", "float32", "ieee"),
        ("high", "float32", "tf32x3"),
        ("default", "float32", "tf32"),
        ("default", "bfloat16", "ieee"),
        ("high", "float16", "ieee"),
    ],
)
def test_dot_precision(precision, dtype, wanted):
    assert dot_precision(precision, dtype) == wanted


def test_a_gpu_old_enough_and_floats_are_admitted():
    specs = {"x": ArraySpec((4, 8), "bfloat16"), "offset": None}
    assert _capability.refusal(H200, specs) is None
    assert _capability.refusal(Target("gpu", "", "8.0"), specs) is None


def test_reasons_name_what_was_asked():
    assert "the target is cpu" in str(_capability.refusal(Target("cpu"), {}))
    assert "is unknown" in str(_capability.refusal(Target("gpu"), {}))
    assert "has 7.5" in str(_capability.refusal(Target("gpu", "Tesla T4", "7.5"), {}))
    floats = {"x": ArraySpec((4,), "float64")}
    assert _capability.refusal(H200, floats) == "x is float64, needs float32, bfloat16, float16"


def test_dtypes_by_name():
    specs = {"cache": ArraySpec((4,), "int8"), "x": ArraySpec((4,), "float32")}
    dtypes = {"cache": ("int8",), "x": ("bfloat16",)}
    assert _capability.refusal(H200, specs, dtypes) == "x is float32, needs bfloat16"
    assert _capability.refusal(H200, {"cache": specs["cache"]}, dtypes) is None


def test_versions_that_cannot_work_are_a_reason(monkeypatch):
    monkeypatch.setattr(_capability, "version_problem", lambda: "a broken pair")
    assert _capability.refusal(H200, {}) == "a broken pair"


def test_the_host_only_in_the_interpreter(monkeypatch):
    monkeypatch.setenv(INTERPRET, "0")
    assert "the target is cpu" in str(_capability.refusal(Target("cpu"), {}))
    monkeypatch.setenv(INTERPRET, "1")
    assert _capability.refusal(Target("cpu"), {}) is None
    assert _capability.refusal(H200, {}) is None
    assert "the target is tpu" in str(_capability.refusal(Target("tpu"), {}))


@pytest.mark.parametrize(
    ("capability", "kib"), [("8.0", 163), ("8.6", 99), ("8.9", 99), ("9.0", 227), ("10.0", 227), ("12.0", 99)]
)
def test_shared_memory_of_one_program(capability, kib):
    assert _capability.shared_memory_limit(Target("gpu", "", capability)) == kib * 1024


def test_shared_memory_in_the_interpreter():
    assert _capability.shared_memory_limit(Target("cpu")) == 227 * 1024

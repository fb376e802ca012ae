"""Lowered code of Triton kernels on disk: read without jax-triton, and only while kernels are compiled as ever."""

from __future__ import annotations

import jax
import pytest

import ejkernel
from ejkernel._dispatch import lowered
from ejkernel.plugin import Target
from ejkernel.utils.kernel_store import stored_kernels
from ejkernel_triton import _jax_triton
from ejkernel_triton._kernel_cache import STORE, Entry

HOPPER = Target("gpu", "", "9.0")
KERNELS = ("gated_linear_unit_backward", "gated_linear_unit_forward", "norm_backward", "norm_forward")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    for name in (_jax_triton._ALWAYS_COMPILE, "EJKERNEL_TRITON_INTERPRET", "JAX_TRITON_DUMP_DIR"):
        monkeypatch.delenv(name, raising=False)


def text_of(rows: int) -> str:
    """A program with both phases of a norm and an activation, as a new process lowers it."""
    lowered._known.clear()
    jax.clear_caches()

    def loss(x, scale):
        return ejkernel.gated_linear_unit(ejkernel.rms_norm(x, scale, platform="triton"), x, platform="triton").sum()

    arrays = (jax.ShapeDtypeStruct((rows, 256), "bfloat16"), jax.ShapeDtypeStruct((256,), "bfloat16"))
    with ejkernel.use(target=HOPPER):
        return jax.jit(jax.grad(loss, (0, 1))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_the_second_process_does_not_call_jax_triton(monkeypatch):
    pytest.importorskip("jax_triton")
    first = text_of(64)
    kept = stored_kernels().count
    # of two operations, the forward phase with residuals and the backward; JAX also traces the former without, which nothing runs
    assert len([*lowered.STORE.folder.iterdir()]) == 4 and "triton_kernel_call" in first

    def refuse():
        raise AssertionError("traced again")

    monkeypatch.setattr(_jax_triton, "_jax_triton", refuse)
    assert text_of(64) == first
    assert stored_kernels().count == kept
    with pytest.raises(AssertionError, match="traced again"):
        text_of(128)


def test_of_a_gradient_only_the_kernels_that_run_are_compiled(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("jax_triton.triton_lib"), "_COMPILED_KERNEL_CACHE", {})
    text_of(96)
    names = [Entry.load(STORE.get(file.stem)).name for file in STORE.folder.iterdir()]
    assert sorted(names) == [f"{name}_kernel" for name in KERNELS]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DISABLE_LLVM_OPT", "1"),
        ("PTXAS_OPTIONS", "-O0"),
        ("TRITON_F32_DEFAULT", "ieee"),
        ("TRITON_PTXAS_PATH", "/elsewhere/ptxas"),
    ],
)
def test_settings_of_the_compiler_make_another_key(name, value, monkeypatch):
    before = _jax_triton.lowered_from()
    monkeypatch.setenv(name, value)
    assert None not in (before, _jax_triton.lowered_from()) and _jax_triton.lowered_from() != before


def test_the_folder_of_tritons_own_cache_makes_no_other_key(monkeypatch):
    before = _jax_triton.lowered_from()
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert _jax_triton.lowered_from() == before


@pytest.mark.parametrize(
    ("name", "value"), [("TRITON_ALWAYS_COMPILE", "1"), ("JAX_TRITON_DUMP_DIR", "dumps"), ("EJKERNEL_TRITON_INTERPRET", "1")]
)
def test_nothing_is_kept_where_kernels_are_to_be_compiled_or_interpreted(name, value, monkeypatch):
    assert _jax_triton.lowered_from() is not None
    monkeypatch.setenv(name, value)
    assert _jax_triton.lowered_from() is None


def test_nothing_is_kept_of_what_an_interceptor_makes():
    with _jax_triton.intercept_launches(lambda *_, **__: []):
        assert _jax_triton.lowered_from() is None


def test_nothing_is_kept_with_knobs_that_are_set_in_python(monkeypatch):
    knobs = pytest.importorskip("triton.knobs")
    assert _jax_triton.lowered_from() is not None
    with knobs.language.scope(), monkeypatch.context() as patch:
        patch.setattr(knobs, "propagate_env", False)
        knobs.language.fp32_default = "ieee"
        assert _jax_triton.lowered_from() is None
    assert _jax_triton.lowered_from() is not None

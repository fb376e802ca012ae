"""Lowered code of Mosaic GPU kernels on disk: read without Pallas."""

from __future__ import annotations

import importlib
import pkgutil
import re

import jax
import pytest

import ejkernel
from ejkernel._dispatch import lowered
from ejkernel.plugin import Target
from ejkernel_pallas.mosaic_gpu import _device
from ejkernel_pallas.mosaic_gpu._device import lowered_from

HOPPER = Target("gpu", "", "9.0")

pytestmark = pytest.mark.skipif(
    not any(re.fullmatch(r"jax_cuda\d+_plugin", module.name) for module in pkgutil.iter_modules()),
    reason="Mosaic GPU lowers with a part of jax's CUDA plugin: pip install jax-cuda13-plugin",
)


def text_of(queries: int) -> str:
    """Causal attention of both phases, as a new process lowers it."""
    lowered._known.clear()
    jax.clear_caches()
    array = jax.ShapeDtypeStruct((1, queries, 2, 64), "bfloat16")

    def loss(query, key, value):
        return ejkernel.flash_attention(query, key, value, causal=True, platform="pallas").sum()

    with ejkernel.use(target=HOPPER):
        return jax.jit(jax.grad(loss, (0, 1, 2))).trace(array, array, array).lower(lowering_platforms=("cuda",)).as_text()


def test_the_second_process_does_not_trace(tmp_path, monkeypatch):
    if _device.version_problem():
        pytest.skip(f"{_device.version_problem()}")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    first = text_of(256)
    # the forward phase with residuals and the backward; JAX also traces the forward phase without, which nothing runs
    assert len([*lowered.STORE.folder.iterdir()]) == 2 and "custom_call @mosaic_gpu" in first
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")

    def refuse(*_, **__):
        raise AssertionError("traced again")

    monkeypatch.setattr(plgpu, "kernel", refuse)
    assert text_of(256) == first
    with pytest.raises(AssertionError, match="traced again"):
        text_of(384)


def test_the_cuda_part_of_jax_and_its_switches_make_the_key(monkeypatch):
    before = lowered_from()
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    switched = lowered_from()
    monkeypatch.setattr(_device, "_cuda_versions", lambda: [("jax_cuda13_plugin", "0.0")])
    assert len({before, switched, lowered_from(), None}) == 4


def test_nothing_is_kept_in_the_interpreter(monkeypatch):
    assert lowered_from() is not None
    monkeypatch.setattr(_device, "gpu_interpreter_is_on", lambda: True)
    assert lowered_from() is None

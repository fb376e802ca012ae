"""`rope`, `qk_norm_rope` and `paged_cache_update` over core's named cases on this host: arguments, handlers' checks, numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import host_calls
import host_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.call import ArraySpec
from ejkernel.operations.paged_cache_update import cases as update_cases, reference as update_reference
from ejkernel.operations.paged_cache_update.interface import OPERATION as UPDATE
from ejkernel.operations.qk_norm_rope import cases as norm_rope_cases, reference as norm_rope_reference
from ejkernel.operations.qk_norm_rope.interface import OPERATION as NORM_ROPE
from ejkernel.operations.rope import cases as rope_cases, reference as rope_reference
from ejkernel.operations.rope.interface import OPERATION as ROPE
from ejkernel.plugin import Target
from ejkernel_cuda import _library
from ejkernel_cuda.paged_cache_update import config as update_config, kernel as update_kernel
from ejkernel_cuda.qk_norm_rope import (
    capability as norm_rope_capability,
    config as norm_rope_config,
    kernel as norm_rope_kernel,
)
from ejkernel_cuda.rope import config as rope_config, kernel as rope_kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
pytestmark = [
    pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing())),
    pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13"),
]


@pytest.fixture(autouse=True)
def calls_answered_here(monkeypatch):
    monkeypatch.setattr(jax.ffi, "ffi_call", host_calls.answered)
    for module in (rope_kernel, norm_rope_kernel, update_kernel):
        monkeypatch.setattr(module, "handler", lambda name: name)


def small(cases: Any) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases.CASES if not case.is_benchmark]


def bound(operation: Any, case: Any, dtype: str) -> Any:
    arrays = case.arrays(np.random.default_rng(7))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    return operation.canonicalise(**made, **case.options)


def wide(values: Any) -> Any:
    def one(value: Any) -> Any:
        value = np.asarray(value)
        return value.astype(np.float64) if jnp.issubdtype(value.dtype, jnp.floating) and value.itemsize > 1 else value

    return jax.tree.map(one, values)


def close(got: Any, exact: Any, limit: float) -> None:
    assert got.shape == exact.shape
    difference = np.linalg.norm(np.asarray(got, np.float64) - exact)
    assert difference <= limit * np.linalg.norm(exact)


@pytest.mark.parametrize("config", [(1, 256), (2, 64), (4, 128)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", small(rope_cases))
def test_rope(case, dtype, config):
    problem = bound(ROPE, case, dtype)
    check_rope(problem.call, problem.inputs, dtype, rope_config.Config(*config))


@pytest.mark.parametrize("alone", ["cos", "sin"])
@pytest.mark.parametrize("name", ["query-alone", "partial"])
def test_rope_where_only_one_of_cos_and_sin_is_shared(name, alone):
    problem = bound(ROPE, next(case for case in rope_cases.CASES if case.name == name), "float32")
    angles = {name: getattr(problem.inputs, name)[:1] for name in ("cos", "sin")}
    angles[alone] = jnp.concatenate([angles[alone], angles[alone][:, ::-1] + 0.25])
    inputs = problem.inputs._replace(**angles)
    call = dataclasses.replace(problem.call, **{name: ArraySpec.of(value) for name, value in angles.items()})
    assert len(inputs.cos) != len(inputs.sin)
    check_rope(call, inputs, "float32", rope_config.Config(4))


@pytest.mark.parametrize("by", [1, 2, 3, 5, 7, 64, 641, 8191, 65537, 2**30 - 1, 2**30 + 1, 2**31 - 1])
def test_division_by_what_a_launch_knows(by):
    last = 2**31 - 1
    for number in {0, 1, by - 1, by, min(by + 1, last), last // by * by - 1, last // by * by, last - 1, last}:
        assert host_kernels.library("heads").divided(number, by) == number // by


def check_rope(call, inputs, dtype, config):
    limit = 1e-6 if dtype == "float32" else 4e-3
    outputs = rope_kernel.forward(call, inputs, config)
    exact = rope_reference.forward(call, wide(inputs))
    close(outputs.query, exact.query, limit)
    if call.key is not None:
        close(outputs.key, exact.key, limit)
    cotangents = ROPE.Outputs(*(None if x is None else x[..., ::-1] + jnp.ones_like(x) for x in inputs[:2]))
    gradients = rope_kernel.backward(call, inputs, outputs, cotangents, config)
    wanted = rope_reference.backward(call, wide(inputs), exact, wide(cotangents))
    for name in ("query", "key", "cos", "sin"):
        if getattr(wanted, name) is not None:
            close(getattr(gradients, name), getattr(wanted, name), limit)


@pytest.mark.parametrize(("span", "partials"), [(1, 3), (4, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", small(norm_rope_cases))
def test_qk_norm_rope(case, dtype, span, partials):
    problem = bound(NORM_ROPE, case, dtype)
    if norm_rope_capability.supports_backward(problem.call, H200) is not None:
        assert case.name == "no-rotation"
        return
    check_norm_rope(problem.call, problem.inputs, dtype, span, partials)


@pytest.mark.parametrize("width", [26, 64, 128, 250, 256])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_that_take_a_whole_warp_or_a_part_of_one(width, interleaved):
    """And pass-through channels that are moved in packs or one by one; batch members with scales of their own."""
    for rotary_dim in {width, width // 4 * 2}:
        rng = np.random.default_rng(width)
        shapes = {"query": (2, 3, 5, width), "key": (2, 3, 2, width), "cos": (3, rotary_dim), "sin": (3, rotary_dim)}
        arrays = {name: jnp.asarray(rng.normal(size=shape), "bfloat16") for name, shape in shapes.items()}
        problem = NORM_ROPE.canonicalise(**arrays, rotary_dim=rotary_dim, interleaved=interleaved)
        scales = [jnp.asarray(rng.normal(size=(members, width)), jnp.float32) for members in (2, 1)]
        inputs = problem.inputs._replace(query_scale=scales[0], key_scale=scales[1])
        specs = {"query_scale": ArraySpec.of(scales[0]), "key_scale": ArraySpec.of(scales[1])}
        check_norm_rope(dataclasses.replace(problem.call, **specs, scale_offset=0.5), inputs, "bfloat16", 4, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["BTHD", "BHTD"])
@pytest.mark.parametrize(("span", "partials"), [(1, 1), (2, 2), (8, 1), (32, 2)])
def test_workers_with_many_spans(dtype, layout, span, partials):
    """Heads in flight across the ends of spans, of tokens and of a worker's share."""
    rng = np.random.default_rng(span)
    shapes = {"query": (2, 7, 19, 256), "key": (2, 7, 3, 256)}
    if layout == "BHTD":
        shapes = {name: (batch, count, length, width) for name, (batch, length, count, width) in shapes.items()}
    shapes |= {"cos": (7, 128), "sin": (7, 128), "query_scale": (256,)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    problem = NORM_ROPE.canonicalise(**arrays, layout=layout)
    check_norm_rope(problem.call, problem.inputs, dtype, span, partials)


def check_norm_rope(call, inputs, dtype, span, partials):
    limit = 2e-6 if dtype == "float32" else 5e-3
    call = dataclasses.replace(call, save_residuals=True)
    heads_per_span = 8 if span > 4 else 4
    config = norm_rope_config.ForwardConfig(heads_per_span, 16 * heads_per_span)
    outputs = norm_rope_kernel.forward(call, inputs, config)
    exact = norm_rope_reference.forward(call, wide(inputs))
    for got, wanted in zip(outputs, exact, strict=True):
        close(got, wanted, limit)
    light = norm_rope_kernel.forward(dataclasses.replace(call, save_residuals=False), inputs, config)
    assert light.query_rstd is None
    np.testing.assert_array_equal(light.key, outputs.key)
    cotangents = NORM_ROPE.Outputs(*(x[..., ::-1] + jnp.ones_like(x) for x in inputs[:2]))
    gradients = norm_rope_kernel.backward(call, inputs, outputs, cotangents, norm_rope_config.BackwardConfig(span, partials))
    wanted = norm_rope_reference.backward(call, wide(inputs), exact, wide(cotangents))
    for got, other in zip(gradients, wanted, strict=True):
        if other is not None:
            close(got, other, limit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", small(update_cases))
@pytest.mark.parametrize("config", [(256, 1), (32, 3), (64, 32)])
def test_paged_cache_update(case, dtype, config):
    problem = bound(UPDATE, case, dtype)
    config = update_config.PagedCacheUpdateConfig(*config)
    got = update_kernel.forward(problem.call, problem.inputs, config)
    wanted = update_reference.forward(problem.call, wide(problem.inputs))
    for pages, exact, before in zip(got, wanted, problem.inputs[2:4], strict=True):
        if exact is None:
            assert pages is None
            continue
        pages, exact, before = (np.asarray(value, np.float64) for value in (pages, exact, before))
        untouched = exact == before
        np.testing.assert_array_equal(pages[untouched], exact[untouched])
        # Nearest in what pages hold; the quotient of a key and its scale is rounded to float32 first.
        step = {"int8": 0.0, "float8_e4m3fn": 2**-3, "float8_e5m2": 2**-2}.get(problem.call.key_pages.dtype, 2**-8)
        np.testing.assert_allclose(pages, exact, rtol=step, atol=1e-6)
        assert np.sum(np.abs(pages - exact) > 1e-6 * np.abs(exact)) <= 0.01 * exact.size


def test_values_that_bytes_cannot_hold():
    """NaN, infinities, ties and numbers out of range, as the contract says."""
    values = np.array([np.nan, np.inf, -np.inf, 500.0, -1e6, 0.5, 1.5, -2.5, 126.5, 17.0, 2**-10, -0.0], np.float32)
    expected = {
        "int8": [0, 127, -128, 127, -128, 0, 2, -2, 126, 17, 0, 0],
        "float8_e4m3fn": [np.nan, 448, -448, 448, -448, 0.5, 1.5, -2.5, 128, 16, 0, 0],
        "float8_e5m2": [np.nan, 57344, -57344, 512, -57344, 0.5, 1.5, -2.5, 128, 16, 2**-10, 0],
    }
    for dtype, wanted in expected.items():
        pages = jnp.zeros((1, 1, 1, len(values)), dtype)
        new = jnp.asarray(values)[None, None]
        arrays = {"query_start_loc": jnp.array([0, 1]), "kv_lens": jnp.array([1]), "block_tables": jnp.array([[0]])}
        problem = UPDATE.canonicalise(new, new, pages, pages, **arrays)
        got = update_kernel.forward(problem.call, problem.inputs, update_config.PagedCacheUpdateConfig(32, 1))
        np.testing.assert_array_equal(np.asarray(got.key_pages, np.float32).reshape(-1), np.array(wanted, np.float32))


def test_batch_members_have_their_own_requests():
    """Two caches, of which the second has other lengths and an own scale."""
    case = next(case for case in update_cases.CASES if case.name == "scaled")
    problem = bound(UPDATE, case, "float32")
    two = problem.inputs._replace(
        **{name: jnp.concatenate([getattr(problem.inputs, name)] * 2) for name in ("key", "value", "key_pages", "value_pages")},
        kv_lens=jnp.stack([problem.inputs.kv_lens[0], problem.inputs.kv_lens[0] - 1]),
        key_scale=jnp.stack([problem.inputs.key_scale[0], problem.inputs.key_scale[0] * 2]),
    )
    specs = {name: ArraySpec.of(value) for name, value in two._asdict().items()}
    call = dataclasses.replace(problem.call, **specs)
    got = update_kernel.forward(call, two, update_config.PagedCacheUpdateConfig(64, 4))
    wanted = update_reference.forward(call, wide(two))
    for pages, exact in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(pages), exact, rtol=1e-6)

"""`paged_attention` of many new tokens on this host: core's named cases and problems of its own."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import host_calls
import host_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.paged_attention import cases, reference
from ejkernel.operations.paged_attention.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel.testing.problem import fields_refused
from ejkernel_cuda import _library
from ejkernel_cuda._plugin import ejkernel_plugin
from ejkernel_cuda.paged_prefill import capability, config, kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
LIMITS = {"bfloat16": 4e-3, "float16": 5e-4}
LENGTHS = ((40, 300), (1, 64), (3, 0), (0, 40), (70, 70), (1, 129))
pytestmark = [
    pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing())),
    pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13"),
]


@pytest.fixture(autouse=True)
def calls_answered_here(monkeypatch):
    monkeypatch.setattr(jax.ffi, "ffi_call", host_calls.answered)
    monkeypatch.setattr(kernel, "handler", lambda name: name)


def check(call: Any, inputs: Any, cfg: Any = None) -> Any:
    """Against float64; the results."""
    assert capability.supports_forward(call, H200) is None
    call = dataclasses.replace(call, return_lse=True)
    got = kernel.forward(call, inputs, cfg or config.FORWARD.heuristic(call, H200))
    exact = reference.forward(call, widened(inputs))
    for result, wanted, limit in ((got.out, exact.out, LIMITS[call.query.dtype]), (got.lse, exact.lse, 1e-4)):
        result = np.asarray(result, np.float64)
        np.testing.assert_array_equal(np.isfinite(result), np.isfinite(wanted))
        sure = np.isfinite(wanted)
        np.testing.assert_array_equal(result[~sure], wanted[~sure])
        assert np.linalg.norm(result[sure] - wanted[sure]) <= limit * np.linalg.norm(wanted[sure])
    return got


def problem(requests: Any = LENGTHS, dtype: str = "bfloat16", seed: int = 0, **options: Any) -> Any:
    """A problem whose unused page slots hold NaN; `options` of the call and of the arrays."""
    names = ("softmax_scale", "causal", "sliding_window", "logits_soft_cap")
    named = {name: options.pop(name) for name in names if name in options}
    layout = {"layout": options["layout"]} if "layout" in options else {}
    usual = {"heads": 4, "key_heads": 2, "page_size": 16, "head_size": 128}
    arrays = cases._arrays(requests, **{**usual, **options})(np.random.default_rng(seed))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    return OPERATION.canonicalise(**made, **layout, **named)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in cases.CASES if not c.is_benchmark])
def test_cases(case, dtype):
    arrays = case.arrays(np.random.default_rng(7))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    bound = OPERATION.canonicalise(**made, **case.options)
    unknown = fields_refused(ejkernel_plugin(), "paged_attention", bound.call, "prefill")
    refused = unknown or capability.supports_forward(bound.call, H200)
    if refused:
        pytest.skip(str(refused))
    check(bound.call, bound.inputs)


@pytest.mark.parametrize("pack_gqa", [False, True])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_sizes(size, pack_gqa):
    made = problem(head_size=size)
    check(made.call, made.inputs, config.PrefillConfig(pack_gqa))


@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("size", [64, 256])
def test_page_sizes(page_size, size):
    made = problem(page_size=page_size, head_size=size)
    check(made.call, made.inputs)


@pytest.mark.parametrize(("heads", "key_heads"), [(3, 3), (6, 2), (8, 1), (12, 2), (64, 1)])
def test_groups(heads, key_heads):
    made = problem(((20, 150), (2, 2)), heads=heads, key_heads=key_heads, head_size=64)
    check(made.call, made.inputs)


@pytest.mark.parametrize("layout", ["pthd", "phtd", "hptd", "interleaved", "packed", "side_by_side"])
def test_layouts(layout):
    made = problem(((20, 150), (2, 9)), layout=layout, head_size=64, heads=8, key_heads=4)
    check(made.call, made.inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 7, 150, 1000])
def test_windows(window, causal):
    made = problem(sliding_window=window, causal=causal, head_size=64)
    check(made.call, made.inputs)


@pytest.mark.parametrize(("cap", "scale"), [(None, 0.3), (5.0, 0.3), (None, -0.2), (None, 0.0)])
def test_logits_and_sinks(cap, scale):
    made = problem(logits_soft_cap=cap, softmax_scale=scale, sinks=(4,), head_size=64)
    check(made.call, made.inputs)


def test_more_requests_than_a_warp_has_lanes():
    made = problem(tuple((index % 4, 3 + 5 * index) for index in range(70)), head_size=64)
    check(made.call, made.inputs)


@pytest.mark.parametrize("page", [-1, 10**6])
def test_pages_outside_of_the_cache_are_not_seen(page):
    made = problem(((70, 300), (1, 64)), head_size=64)
    tables = np.array(made.inputs.block_tables)
    tables[0, 0, [0, 7, 18]], tables[0, 1, 3] = page, page
    check(made.call, made.inputs._replace(block_tables=jnp.asarray(tables)))


@pytest.mark.parametrize(("first", "last"), [(0, 50), (9, 50), (9, 115)])
def test_tokens_of_no_request_give_zeros(first, last):
    made = problem(((115, 300),), head_size=64, sinks=(4,))
    inputs = made.inputs._replace(query_start_loc=jnp.array([[first, last]], jnp.int32))
    got = check(made.call, inputs)
    outside = np.r_[0:first, last:115]
    assert not np.asarray(got.out, np.float32)[0, outside].any()


def test_starts_that_do_not_ascend_write_nowhere_else():
    """Results are unspecified then; guards around them stay."""
    made = problem(((60, 100), (20, 80)), head_size=64)
    for starts in itertools.permutations((-7, 40, 200)):
        inputs = made.inputs._replace(query_start_loc=jnp.array([starts], jnp.int32))
        kernel.forward(made.call, inputs, config.PrefillConfig(True))


@pytest.mark.parametrize("own_pages", [False, True])
def test_batch_members(own_pages):
    members = [problem(((30, 100), (2, 40)), head_size=64, seed=seed) for seed in range(2)]
    names = ("query", "kv_lens", "block_tables", *(("key_pages", "value_pages") if own_pages else ()))
    stacked = {name: jnp.concatenate([getattr(one.inputs, name) for one in members]) for name in names}
    inputs = members[0].inputs._replace(**stacked)
    specs = {name: dataclasses.replace(getattr(members[0].call, name), shape=array.shape) for name, array in stacked.items()}
    check(dataclasses.replace(members[0].call, **specs), inputs)


@pytest.mark.parametrize("value_size", [8, 40, 128])
def test_values_of_another_size(value_size):
    made = problem(value_size=value_size, head_size=64)
    check(made.call, made.inputs)


def test_the_same_bits_every_time():
    made = problem(head_size=64)
    first, again = (np.asarray(check(made.call, made.inputs).out) for _ in range(2))
    np.testing.assert_array_equal(first, again)

"""Gradients of `paged_attention` in Triton on a machine without a GPU: numbers in the interpreter, machine code."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_phases import cotangents_of
from paged_problems import MIXED, PROBLEMS, draw, problem

from ejkernel.call import ArraySpec, has_gradient, named
from ejkernel.call.order import UNMEASURED, default_priority
from ejkernel.operations.paged_attention import reference
from ejkernel.operations.paged_attention.cases import CASES
from ejkernel.operations.paged_attention.interface import OPERATION, PagedAttentionOutputs
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel.utils.tolerance import deviation
from ejkernel_triton.paged_attention import capability
from ejkernel_triton.paged_attention.config import BackwardConfig, backward_heuristic

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.paged_attention import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
SMALL = BackwardConfig(1, 16, 4, 1, 1, 16, 4, 1)
LARGE = BackwardConfig(4, 32, 4, 2, 3, 64, 4, 2)


def outputs_of(call, inputs):
    exact = reference.forward(call, widened(inputs))
    return exact, PagedAttentionOutputs(jnp.asarray(exact.out, call.query.dtype), jnp.asarray(exact.lse, jnp.float32))


def check(call, inputs, chosen, limit=3e-5, cotangents=None):
    cotangents = cotangents_of(OPERATION, call) if cotangents is None else cotangents
    exact, outputs = outputs_of(call, inputs)
    got = kernel.backward(call, inputs, outputs, cotangents, chosen)
    wanted = reference.backward(call, widened(inputs), exact, widened(cotangents))
    for name, array in named(inputs):
        found = getattr(got, name)
        assert (found is None) == (not has_gradient(array)), name
        if found is not None:
            assert (found.shape, found.dtype) == (array.shape, array.dtype), name
            assert deviation(found, getattr(wanted, name), floor=1e-3).norm < limit, name
    return got


@pytest.mark.parametrize("chosen", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients(interpreted, name, chosen):
    check(*problem(**PROBLEMS[name]), chosen)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 1e-2), ("float16", 2e-3)])
def test_gradients_of_narrow_types(interpreted, dtype, limit):
    check(*problem(dtype=dtype), LARGE, limit)


def test_pages_that_requests_share(interpreted):
    """A prefix of three pages, and in one table a page twice."""
    call, inputs = problem(requests=((1, 70), (3, 40), (2, 33)), softmax_aux=draw(2))
    tables = inputs.block_tables.at[0, 1:, :3].set(inputs.block_tables[0, 0, :3]).at[0, 0, 5].set(inputs.block_tables[0, 0, 6])
    inputs = inputs._replace(block_tables=tables)
    once, again = (check(call, inputs, LARGE) for _ in range(2))
    for first, second in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(first, second)


def test_batch_members_share_what_they_may(interpreted):
    call, inputs = problem(qq_bias=draw(6, 4, 4), alibi_slopes=np.array([0.1, 0.4], np.float32))
    doubled = {
        "query": jnp.concatenate([inputs.query, inputs.query[:, ::-1]]),
        "kv_lens": jnp.concatenate([inputs.kv_lens, jnp.maximum(inputs.kv_lens - 2, 0)]),
        "value_pages": jnp.concatenate([inputs.value_pages, 2 * inputs.value_pages]),
    }
    inputs = inputs._replace(**doubled)
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in doubled.items()})
    check(call, inputs, LARGE)


@pytest.mark.parametrize("missing", ["out", "lse"])
def test_only_one_cotangent(interpreted, missing):
    call, inputs = problem(key_heads=2, heads=4)
    cotangents = cotangents_of(OPERATION, call)
    zero = {missing: jnp.zeros_like(getattr(cotangents, missing))}
    exact, outputs = outputs_of(call, inputs)
    found = kernel.backward(call, inputs, outputs, cotangents._replace(**{missing: None}), LARGE)
    same = kernel.backward(call, inputs, outputs, cotangents._replace(**zero), LARGE)
    wanted = reference.backward(call, widened(inputs), exact, widened(cotangents._replace(**zero)))
    for name in ("query", "key_pages", "value_pages"):
        np.testing.assert_array_equal(getattr(found, name), getattr(same, name))
        assert deviation(getattr(found, name), getattr(wanted, name), floor=1e-3).norm < 1e-5


def test_what_no_request_owns_gets_zeros(interpreted):
    call, inputs = problem(MIXED, spare_tokens=3)
    _, outputs = outputs_of(call, inputs)
    got = kernel.backward(call, inputs, outputs, cotangents_of(OPERATION, call), LARGE)
    assert not np.asarray(got.query[:, -3:]).any()
    unused = np.setdiff1d(np.arange(call.pages.pages), np.asarray(inputs.block_tables))
    assert unused.size
    for pages in (got.key_pages, got.value_pages):
        assert not np.asarray(pages[:, unused]).any()


@pytest.mark.parametrize("size", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loops_hardly_spill(recorder, dtype, size):
    """But where a head of 512 channels is multiplied without tensor cores."""
    requests = ((64, 512),) * 4
    call, inputs = problem(requests, page_size=16, heads=8, key_heads=2, size=size, dtype=dtype)
    outputs = PagedAttentionOutputs(inputs.query, jnp.zeros(inputs.query.shape[:3], jnp.float32))
    kernel.backward(call, inputs, outputs, outputs, backward_heuristic(call, H200))
    assert [launch.kernel.fn.__name__ for launch in recorder.compilations] == ["query_gradient_kernel", "key_gradient_kernel"]
    for launch in recorder.compilations:
        taken = testing.resources(launch.compile(90))
        assert taken.spilling < (0.25 if (dtype, size) == ("float32", 512) else 0.1), (launch.kernel.fn.__name__, taken)
        assert taken.shared <= 227 * 1024


@pytest.mark.parametrize("name", ["bench-mixed-prefill-1k", "everything", "e5m2-unscaled"])
@pytest.mark.parametrize("target", [80, 90, 100])
def test_compiles_elsewhere(triton_cache, target, name):
    case = next(case for case in CASES if case.name == name)
    launches = [launch for _, launch in recorded("paged_attention", case, "bfloat16", target_of(target))]
    names = {launch.kernel.fn.__name__ for launch in launches}
    assert {"query_gradient_kernel", "key_gradient_kernel"} - names <= ({"key_gradient_kernel"} if "e5m2" in name else set())
    assert all(launch.compile(target).asm["ptx"] for launch in launches if "gradient" in launch.kernel.fn.__name__)


def test_xla_stays_the_default():
    call, _ = problem()
    priorities = {
        phase: default_priority("triton", "paged_attention", call, phase, H200).level for phase in ("forward", "backward")
    }
    assert priorities["forward"] > 0 and priorities["backward"] == UNMEASURED


def test_what_is_refused():
    call, _ = problem()
    pages = tuple(
        dataclasses.replace(spec, shape=(2**20, 2**12, 16, *spec.shape[3:])) for spec in (call.key_pages, call.value_pages)
    )
    large = dataclasses.replace(call, key_pages=pages[0], value_pages=pages[1])
    many = dataclasses.replace(large, query=dataclasses.replace(call.query, shape=(2**20, *call.query.shape[1:])))
    assert "more programs" in str(capability.supports_backward(many, H200))
    assert capability.supports_backward(call, H200) == capability.supports_forward(call, H200)

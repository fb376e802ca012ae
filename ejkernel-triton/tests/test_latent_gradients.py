"""Gradients of attention over latents in Triton without a GPU: cases are the conformance suite's; here, tiles, chunks, spills."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.call import ArraySpec
from ejkernel.call.order import UNMEASURED, default_priority
from ejkernel.operations import get_operation, operation_module
from ejkernel.plugin import Target
from ejkernel_triton._interpret import INTERPRET
from ejkernel_triton._latents.config import LatentGradientConfig as Config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from both_phases import check_phases, cotangents_of

from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.latent_paged_attention import capability, config as paged_config, kernel as paged
from ejkernel_triton.sparse_latent_attention import config as sparse_config, gradients, kernel as sparse
from ejkernel_triton.testing import resources

H200 = Target("gpu", "NVIDIA H200", "9.0")
PAGED, SPARSE = get_operation("latent_paged_attention"), get_operation("sparse_latent_attention")
CHOICES = (Config(1, 1, 16, 4, 1), Config(2, 2, 32, 4, 1), Config(4, 3, 16, 4, 2))


def problem(operation, name):
    case = next(case for case in operation_module(operation.name, "cases").CASES if case.name == name)
    bound = operation.canonicalise(**case.arrays(np.random.default_rng(0)), **case.options)
    return dataclasses.replace(bound.call, save_residuals=True), jax.tree.map(jnp.asarray, bound.inputs)


def check(operation, kernel, call, inputs, choice):
    module = paged_config if operation is PAGED else sparse_config
    return check_phases(operation, kernel, call, inputs, (module.heuristic(call, H200), choice), (2e-6, 2e-5))[1]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("name", ["mixed", "everything", "first-keys", "window", "no-rotary-part"])
def test_pages(interpreted, name, choice):
    check(PAGED, paged, *problem(PAGED, name), choice)


def test_pages_that_requests_share(interpreted):
    """The second and the third request begin with the same page, and in one table a page stands twice."""
    call, inputs = problem(PAGED, "window")
    call = dataclasses.replace(call, window=None)
    tables = inputs.block_tables.at[0, 1, 0].set(inputs.block_tables[0, 0, 0]).at[0, 0, 1].set(inputs.block_tables[0, 0, 0])
    inputs = inputs._replace(block_tables=tables)
    once, again = (check(PAGED, paged, call, inputs, CHOICES[1]) for _ in range(2))
    for first, second in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(first, second)


def test_batch_members_share_what_they_may(interpreted):
    call, inputs = problem(PAGED, "everything")
    doubled = {
        "query_nope": jnp.concatenate([inputs.query_nope, inputs.query_nope[:, ::-1]]),
        "query_pe": jnp.concatenate([inputs.query_pe, inputs.query_pe[:, ::-1]]),
        "block_tables": jnp.concatenate([inputs.block_tables, jnp.roll(inputs.block_tables, 1, axis=1)]),
        "kv_lens": jnp.concatenate([inputs.kv_lens, jnp.maximum(inputs.kv_lens - 3, 0)]),
    }
    inputs = inputs._replace(**doubled, pages=jnp.nan_to_num(inputs.pages))
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in doubled.items()})
    check(PAGED, paged, call, inputs, CHOICES[1])


@pytest.mark.parametrize("most", [1, 200, 10**6])
@pytest.mark.parametrize("name", ["rope-part", "any-indices", "poisoned"])
def test_chunks_of_queries(monkeypatch, name, most):
    monkeypatch.setenv(INTERPRET, "1")  # a loop over chunks is traced
    monkeypatch.setattr(sparse_config, "_PARTS", most)
    call, inputs = problem(SPARSE, name)
    chunk = sparse_config.queries_of_chunk(call)
    assert (chunk == 1) == (most == 1) and (chunk == 26) == (most == 10**6)
    check(SPARSE, sparse, call, inputs, CHOICES[1])


def test_without_a_cotangent_of_out(interpreted):
    call, inputs = problem(SPARSE, "every-token")
    outputs = sparse.forward(call, inputs, sparse_config.heuristic(call, H200))
    cotangents = cotangents_of(SPARSE, call)
    zeros = cotangents._replace(out=jnp.zeros_like(cotangents.out))
    found, like = (
        gradients.backward(call, inputs, outputs, each, CHOICES[0]) for each in (cotangents._replace(out=None), zeros)
    )
    for first, second in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize(
    ("operation", "name"),
    [("latent_paged_attention", "bench-decode-b128-4k"), ("sparse_latent_attention", "bench-t8192-h128-k2048")],
)
def test_loops_hardly_spill(triton_cache, operation, name, target):
    case = next(case for case in operation_module(operation, "cases").CASES if case.name == name)
    launches = [launch for _, launch in recorded(operation, case, "bfloat16", target_of(target))]
    names = ("latent_query_gradient", "latent_page_gradient", "sparse_query_gradient", "sparse_part", "sparse_sum")
    launches = [launch for launch in launches if launch.kernel.fn.__name__.removesuffix("_kernel") in names]
    assert len(launches) == (2 if operation == PAGED.name else 3)
    for launch in launches:
        taken = resources(launch.compile(target))
        assert taken.spilling < 0.2, (launch.kernel.fn.__name__, taken)  # 0.08 or 0.15 of a loop, by the version of ptxas
        assert taken.shared <= (163 if target == 80 else 227) * 1024


@pytest.mark.parametrize("operation", [PAGED, SPARSE], ids=lambda each: each.name)
def test_xla_stays_the_default(operation):
    case = next(case for case in operation_module(operation.name, "cases").CASES if not case.tags)
    arrays = {
        name: jnp.asarray(array, jnp.bfloat16 if array.dtype == np.float32 else array.dtype)
        for name, array in case.arrays(np.random.default_rng(0)).items()
    }
    call = operation.canonicalise(**arrays, **case.options).call
    priorities = [default_priority("triton", operation.name, call, phase, H200).level for phase in ("forward", "backward")]
    assert priorities[0] > 0 and priorities[1] == UNMEASURED


def test_what_is_refused():
    call, _ = problem(PAGED, "decode")
    many = dataclasses.replace(call, pages=dataclasses.replace(call.pages, shape=(1, 2**28, 256, 10)))
    assert "more programs" in str(capability.supports_backward(many, H200))
    assert capability.supports_backward(call, H200) == capability.supports_forward(call, H200)

"""A benchmark of small cases on XLA, beside the peers that are in JAX."""

from __future__ import annotations

import importlib.util

import jax
import pytest

import ejkernel_bench as bench
from ejkernel.testing.problem import cases_of
from ejkernel_bench import _run
from ejkernel_bench._problem import prepare
from ejkernel_bench.peers import known_peers

needs_jla = pytest.mark.skipif(importlib.util.find_spec("jla") is None, reason="install jax-linear-attention")


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    """Nobody measures the machine for these."""
    made_up = {"flops_per_s": {"float32": 1e9}, "bytes_per_s": 1e9, "how": "made up"}
    monkeypatch.setattr(_run, "measure_limits", lambda dtypes, backend: made_up)


@pytest.mark.parametrize(
    ("operation", "case", "peer"),
    [
        ("flash_attention", "window-sides", "jax.nn"),
        ("grouped_matmul", "transposed", "lax.ragged_dot"),
        ("cross_entropy", "head-soft-cap", "jax"),
        ("rope", "gqa", "jax"),
        ("mean_pooling", "heads", "jax"),
        ("causal_conv1d", "silu", "jax"),
        ("scaled_matmul", "float8-transposed", "jax"),
        ("scaled_matmul", "int8", "jax"),
        ("gated_linear_unit", "gelu-packed", "jax"),
        ("gated_linear_unit", "silu", "jax"),
        ("moe_route", "softmax", "jax"),
        ("moe_permute", "plain", "jax"),
        ("moe_unpermute", "weights", "jax"),
        ("delta_rule", "plain", "lax.scan"),
        ("selective_scan", "state", "lax.scan"),
        ("rwkv4", "plain", "lax.scan"),
        ("linear_recurrence", "scalar", "lax.scan"),
        ("linear_recurrence", "scalar", "jax chunked"),
        pytest.param("delta_rule", "normalised", "jla", marks=needs_jla),
        pytest.param("linear_recurrence", "packed-reset", "jla", marks=needs_jla),
        pytest.param("linear_recurrence", "value-groups", "jla", marks=needs_jla),
        pytest.param("delta_rule", "gated", "jla", marks=needs_jla),
        pytest.param("selective_scan", "skip", "jla", marks=needs_jla),
    ],
)
def test_peer(operation, case, peer):
    settings = bench.Settings(
        operations=(operation,), size="test", case=case, peers=(peer,), platforms=("xla",), rounds=2, input_sets=2
    )
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as in a user's process
        cases = bench.run(settings, progress=False)["cases"]
    assert [found["phase"] for found in cases] == ["forward", "backward"]
    for found in cases:
        runs = {run["name"]: run for run in found["runs"]}
        assert list(runs) == ["xla", peer] and runs["xla"]["chosen"]
        assert found["reference"] == "NumPy float64"
        for run in runs.values():
            assert run["status"] == "ok" and len(run["wall_s"]) == 2
            assert 0 <= max(error["norm"] for error in run["error"].values()) < 2e-5


@pytest.mark.parametrize(
    ("operation", "case", "peer", "reason"),
    [
        ("flash_attention", "sinks", "jax.nn", "does not do softmax_aux"),
        ("flash_attention", "soft-cap", "jax.nn", "does not do logits_soft_cap"),
        ("flash_attention", "bottom-right", "jax.nn", "does not do query_offset"),
        ("flash_attention", "causal", "jax.nn cudnn", "cuDNN takes bfloat16 and float16"),
        ("grouped_matmul", "existing-out", "lax.ragged_dot", "does not do existing_out"),
        ("rope", "per-channel", "jax", "takes one angle per pair of channels"),
        ("mean_pooling", "packed", "jax", "does not do cu_seqlens"),
    ],
)
def test_refusals(operation, case, peer, reason):
    found = next(one for one in cases_of(operation) if one.name == case)
    request, inputs = prepare(bench.Selected(operation, found, "float32"))
    adapter = next(one for one in known_peers() if one.name == peer)
    assert adapter.build(operation, request.call, inputs) == reason

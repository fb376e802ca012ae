"""`flash_attention` by cuDNN on a machine without it: programs are those of jax, and mean what core says they must."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import re

import cudnn_in_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.flash_attention import reference
from ejkernel.operations.flash_attention.cases import CASES
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.operations.flash_attention.pairs import visible
from ejkernel.plugin import Target
from ejkernel.testing.problem import Problem, cases_of
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close
from ejkernel_cuda.cudnn import _call
from ejkernel_cuda.cudnn.flash_attention import capability, kernel
from ejkernel_cuda.cudnn.flash_attention.band import Band, band_of

A100, H200, B200 = (Target("gpu", *kind) for kind in (("NVIDIA A100", "8.0"), ("NVIDIA H200", "9.0"), ("NVIDIA B200", "10.0")))
NAME = "cuda.cudnn"


KIT = [case for case in cases_of("flash_attention") if "extreme" not in case.tags]  # those are for float32


@pytest.fixture(autouse=True)
def any_order(monkeypatch):
    """Gradients in any order are permitted, unless a test takes that back."""
    monkeypatch.setenv(capability.ANY_ORDER, "1")
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.fixture
def in_numpy(monkeypatch):
    monkeypatch.setattr(_call, "custom_call", cudnn_in_numpy.custom_call)
    with ejkernel.use(target=H200):
        yield


def call_of(queries=64, keys=None, heads=4, key_heads=2, size=64, value_size=None, batch=2, dtype="bfloat16", **options):
    keys = queries if keys is None else keys
    return FlashAttentionCall(
        query=ArraySpec((batch, queries, heads, size), dtype),
        key=ArraySpec((batch, keys, key_heads, size), dtype),
        value=ArraySpec((batch, keys, key_heads, value_size or size), dtype),
        **{"softmax_scale": 0.125, **options},
    )


# The program


def calls_in(program):
    """Name, config, types and layouts of every cuDNN call in a program."""
    pattern = r'custom_call @(__cudnn\S+?)\(.*?\) \{(.*?)backend_config = "(.*?)", (.*)'
    found = re.findall(pattern, program)
    return [(name, version, json.loads(config.replace("\\22", '"')), rest) for name, version, config, rest in found]


def lowered(function, *specs):
    return calls_in(jax.jit(function).trace(*specs).lower(lowering_platforms=("cuda",)).as_text())


@pytest.fixture
def jax_sees_hopper(monkeypatch):
    """jax asks for cuDNN and for the device while it traces."""
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(module, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(module, "is_cuda_compute_capability_equal", lambda capability: False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 64, 64, 4, 2, 64), {}),
        ((1, 18, 38, 6, 6, 128), {}),
        ((2, 64, 64, 4, 1, 64), {"causal": True}),
        ((2, 66, 34, 4, 2, 256), {"causal": True, "softmax_scale": 0.3}),
        ((3, 64, 64, 4, 2, 8), {"causal": True, "sliding_window": (7, 0)}),
        ((2, 2, 40, 4, 2, 64), {}),
    ],
)
def test_programs_are_those_of_jax(jax_sees_hopper, sizes, options, dtype):
    batch, queries, keys, heads, key_heads, size = sizes
    query = jax.ShapeDtypeStruct((batch, queries, heads, size), dtype)
    key = jax.ShapeDtypeStruct((batch, keys, key_heads, size), dtype)

    def ours(query, key, value):
        with ejkernel.use(target=H200):
            return ejkernel.flash_attention(query, key, value, platform=NAME, **options)

    def theirs(query, key, value):
        return jax.nn.dot_product_attention(
            query, key, value, implementation="cudnn", scale=options.get("softmax_scale"),
            is_causal=options.get("causal", False), local_window_size=options.get("sliding_window"),
        )  # fmt: skip

    def both(attention):
        def run(query, key, value, grad):
            out, pullback = jax.vjp(attention, query, key, value)
            return out, pullback(grad)

        return run

    assert lowered(ours, query, key, key) == lowered(theirs, query, key, key)
    mine, other = (lowered(both(each), query, key, key, query) for each in (ours, theirs))
    assert [name for name, *_ in mine] == [_call.FORWARD, _call.BACKWARD]
    assert mine == other


def test_every_admitted_case_lowers():
    """Both phases, without a GPU and without cuDNN; the conformance suite does so for other targets."""
    lowerings = 0
    for case in KIT:
        with ejkernel.use(target=H200):
            problem = Problem("flash_attention", case, "bfloat16", NAME)
            if problem.refusal() is not None:
                continue
            specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), problem.differentiable)
            request, backward = problem.request(), problem.refusal("backward") is None

            def run(values, problem=problem, request=request, backward=backward):
                if not backward:
                    return problem.public(request, values)
                out, pullback = jax.vjp(lambda values: problem.public(request, values), values)
                return out, pullback(out)

            names = [name for name, *_ in lowered(run, specs)]
            assert names == [_call.FORWARD, _call.BACKWARD][: 1 + backward], case.name
            lowerings += 1
    assert lowerings == len(ADMITTED)


def test_programs_are_exported():
    specs = [jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)] * 3

    def loss(*arrays):
        with ejkernel.use(target=H200):
            return ejkernel.flash_attention(*arrays, causal=True, platform=NAME).astype(jnp.float32).sum()

    program = jax.jit(jax.value_and_grad(loss))
    exported = jax.export.export(program, platforms=["cuda"], disabled_checks=ejkernel.EXPORT_DISABLED_CHECKS)(*specs)
    assert [name for name, *_ in calls_in(exported.mlir_module())] == [_call.FORWARD, _call.BACKWARD]


@pytest.mark.parametrize("target", [A100, H200])
def test_what_is_admitted_jax_admits(jax_sees_hopper, monkeypatch, target):
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_compute_capability", lambda wanted: float(target.compute_capability) >= float(wanted))
    admitted = 0
    for size, value_size, queries, keys, causal, dtype in itertools.product(
        (1, 8, 64, 120, 128, 192, 256, 264), (8, 128, 256), (1, 2, 65, 66), (1, 64), (False, True), ("bfloat16", "float32")
    ):
        call = call_of(queries, keys, size=size, value_size=value_size, dtype=dtype, causal=causal)
        band = band_of(call)
        if capability.supports_backward(call, target) is not None:
            continue
        width = capability.padded_size(call)
        query = jax.ShapeDtypeStruct((2, queries, 4, width), dtype)
        key = jax.ShapeDtypeStruct((2, band.keys, 2, width), dtype)

        def loss(query, key, value, causal=band.causal):
            out = jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation="cudnn")
            return out.astype(jnp.float32).sum()

        jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), query, key, key)
        admitted += 1
    assert admitted >= 40


# The meaning

ADMITTED = {
    "plain", "tails", "more-queries", "gqa", "gqa-causal-tail", "mqa", "value-size", "wide-value", "head-size-1", "head-size-37",
    "scale", "causal", "causal-more-queries", "window-causal", "window-0", "one-token", "one-query", "lse",
}  # fmt: skip
"""The cases of core that cuDNN computes; gradients of those with even numbers of queries and of keys that are seen."""


def test_admitted_cases():
    with ejkernel.use(target=H200):
        found = {case.name for case in KIT if Problem("flash_attention", case, "float16", NAME).refusal() is None}
    assert found == ADMITTED


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", sorted(ADMITTED))
def test_outputs(in_numpy, name, dtype):
    check_outputs(Problem("flash_attention", next(case for case in CASES if case.name == name), dtype, NAME))


def check_outputs(problem):
    for what, value in problem.outputs().items():
        check_close(what, value, getattr(problem.expected_outputs, what), FORWARD[problem.dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", sorted(ADMITTED - {"one-token", "one-query", "lse"}))
def test_gradients(in_numpy, name, dtype):
    case = next(case for case in CASES if case.name == name)
    problem = Problem("flash_attention", cudnn_in_numpy.even(case), dtype, NAME)
    assert problem.refusal("backward") is None
    check_outputs(problem)
    for what, value in problem.gradients().items():
        check_close(f"gradient of {what}", value, problem.expected_gradients[what], GRADIENT[dtype])


CUT = {
    "decode": ((1, 40), {"causal": True, "causal_alignment": "bottom_right"}),
    "decode-window": ((1, 40), {"causal": True, "causal_alignment": "bottom_right", "sliding_window": (7, 0)}),
    "keys-behind": ((10, 40), {"causal": True}),
    "window-wide": ((10, 10), {"sliding_window": (9, 9)}),
    "window-before": ((10, 40), {"sliding_window": (5, 0)}),
    "window-to-the-diagonal": ((24, 24), {"sliding_window": (5, 0)}),
    "first-key-only": ((1, 40), {"causal": True}),
}


@pytest.mark.parametrize("name", CUT)
def test_unseen_keys_are_cut_off(in_numpy, name):
    (queries, keys), options = CUT[name]
    rng = np.random.default_rng(0)
    shapes = ((2, queries, 4, 16), (2, keys, 2, 16), (2, keys, 2, 24))
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float16) for shape in shapes]
    bound = reference_bound(arrays, options)
    seen = np.broadcast_to(visible(bound.call, bound.inputs, np), (1, 1, queries, keys)).any((0, 1, 2))
    poisoned = [arrays[0], *(jnp.where(seen[:, None, None], each, jnp.nan) for each in arrays[1:])]
    call = dataclasses.replace(bound.call, save_residuals=True)
    wide = FlashAttentionInputs(*(np.asarray(each, np.float64) for each in poisoned))
    expected = reference.forward(call, wide)

    def attend(*arrays):
        return ejkernel.flash_attention(*arrays, platform=NAME, **options)

    check_close("output", attend(*poisoned), expected.out, FORWARD["float16"])
    if queries % 2:
        return
    grad = rng.standard_normal((2, queries, 4, 24)).astype(np.float16)
    found = jax.vjp(attend, *poisoned)[1](jnp.asarray(grad))
    wanted = reference.backward(call, wide, expected, FlashAttentionOutputs(grad.astype(np.float64)))
    for what, got, want in zip(("query", "key", "value"), found, wanted[:3], strict=True):
        check_close(f"gradient of {what}", got, want, GRADIENT["float16"])
        assert np.all(np.isfinite(got))


def reference_bound(arrays, options):
    from ejkernel.operations.flash_attention.interface import OPERATION

    return OPERATION.canonicalise(*arrays, **options)


@pytest.mark.parametrize("poisoned", ["key", "value"])
def test_nan_reaches_only_queries_that_see_it(in_numpy, poisoned):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, 12, 2, 8)).astype(np.float16) for name in ("query", "key", "value")}
    arrays[poisoned][:, 7] = np.nan if poisoned == "key" else np.inf
    query, key, value = map(jnp.asarray, arrays.values())

    def attend(*arrays):
        return ejkernel.flash_attention(*arrays, causal=True, platform=NAME)

    out, pullback = jax.vjp(attend, query, key, value)
    assert np.all(np.isfinite(out[:, :7])) and np.all(np.isnan(out[:, 7:]))
    d_query, *_ = pullback(jnp.ones_like(out))
    assert np.all(np.isfinite(d_query[:, :7])) and np.all(np.isnan(d_query[:, 7:]))


def test_gradients_from_residuals_of_another_platform(in_numpy):
    """Output and log-sum-exp of the float64 reference, rounded as the contract says."""
    case = next(case for case in CASES if case.name == "gqa-causal-tail")
    problem = Problem("flash_attention", cudnn_in_numpy.even(case), "bfloat16", NAME)
    residuals = problem.expected_outputs
    outputs = FlashAttentionOutputs(jnp.asarray(residuals.out, jnp.bfloat16), jnp.asarray(residuals.lse, jnp.float32))
    cotangents = FlashAttentionOutputs(problem.cotangents["out"])
    found = kernel.backward(problem.bound.call, problem.bound.inputs, outputs, cotangents, None)
    for name, value in zip(("query", "key", "value"), found[:3], strict=True):
        check_close(f"gradient of {name}", value, problem.expected_gradients[name], GRADIENT["bfloat16"])


def pairs_of(band, queries, keys):
    row, column = np.ogrid[:queries, :keys]
    column = column - band.first
    seen = (column >= 0) & (column < band.keys) & np.ones((queries, 1), bool)
    if band.causal:
        seen = seen & (column <= row)
    return seen if band.window is None else seen & (column > row - band.window)


def every_band(queries, keys):
    for first, stop in itertools.combinations(range(keys + 1), 2):
        yield Band(first, stop)
        yield Band(first, stop, True)
        yield from (Band(first, stop, True, window) for window in range(1, queries + 1) if queries <= stop - first)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (5, 1), (4, 4), (3, 5), (5, 3)])
def test_bands(queries, keys):
    """Over all offsets and windows: the band's pairs are the call's, and where none is found there is none."""
    found = refused = 0
    sides = (None, *range(6))
    known = {pairs_of(band, queries, keys).tobytes() for band in every_band(queries, keys)}
    for causal, offset, left, right in itertools.product((False, True), range(-6, 7), sides, sides):
        window = None if left is None and right is None else (left, right)
        call = call_of(queries, keys, causal=causal, query_offset=offset, window=window)
        if causal and right is not None:
            continue  # canonical calls leave it away
        wanted = np.broadcast_to(visible(call, FlashAttentionInputs(None, None, None), np), (1, 1, queries, keys))[0, 0]
        band = band_of(call)
        if isinstance(band, Band):
            assert np.array_equal(pairs_of(band, queries, keys), wanted), (call, band)
            assert wanted.any(axis=1).all()
            found += 1
        else:
            assert not wanted.any(axis=1).all() or wanted.tobytes() not in known, (call, band)
            refused += 1
    assert found and refused


# Refusals


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "query is float32, needs bfloat16, float16"),
        ({"bias": ArraySpec((1, 1, 64, 64), "bfloat16")}, "bias: a bias of -inf masks its pair"),
        ({"mask": ArraySpec((1, 1, 64, 64), "bool")}, "mask: a fully masked row must give 0"),
        ({"query_segments": ArraySpec((1, 64), "int32")}, "query_segments: segments and lengths are not passed to cuDNN"),
        ({"query_positions": ArraySpec((1, 64), "int32")}, "query_positions: cuDNN counts positions itself"),
        ({"key_positions": ArraySpec((1, 64), "int32")}, "key_positions: cuDNN counts positions itself"),
        ({"softmax_aux": ArraySpec((1, 4, 1), "float32")}, "softmax_aux: "),
        ({"chunk_size": 16}, "chunk_size: cuDNN has no chunks"),
        ({"causal": True, "prefix": 3}, "prefix: cuDNN has no prefix"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap: "),
        ({"dropout_rate": 0.1}, "dropout_prob is 0.1"),
        ({"normalize_output": False}, "normalize_output=False"),
        ({"logits_dtype": "bfloat16"}, "logits_dtype is bfloat16"),
        ({"softmax_scale": -0.5}, "softmax_scale is -0.5, cuDNN needs one above 0"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0"),
        ({"queries": 0, "keys": 4}, "empty array"),
        ({"keys": 0}, "empty array"),
        ({"batch": 0}, "empty array"),
        ({"size": 257}, "heads of 257 with values of 257, cuDNN takes up to 256"),
        ({"size": 64, "value_size": 320}, "values of 320"),
        ({"heads": 70000, "key_heads": 1}, "a batch of 2 with 70000 heads"),
        ({"queries": 2**20, "heads": 64}, "more than 2147483647 elements"),
        ({"causal": True, "query_offset": 3, "keys": 67}, "query 0 sees 4 keys and the last sees more"),
        ({"causal": True, "query_offset": -3}, "the first queries see no key"),
        ({"window": (3, None)}, "open to the right"),
        ({"window": (3, 2)}, "query 0 sees 3 keys"),
        ({"causal": True, "window": (3, None), "keys": 16}, "the last queries see no key"),
        ({"causal": True, "window": (60, None), "keys": 16}, "a window over 64 queries and 16 keys"),
    ],
)
def test_refusals(changes, reason):
    for supports in (capability.supports_forward, capability.supports_backward):
        assert reason in supports(call_of(**changes), H200)


def test_refused_targets():
    call = call_of()
    for supports in (capability.supports_forward, capability.supports_backward):
        assert supports(call, H200) is supports(call, A100) is supports(call, B200) is None
        assert "needs an NVIDIA GPU" in supports(call, Target("tpu"))
        assert "unknown" in supports(call, Target("gpu"))
        assert "8.0 or newer" in supports(call, Target("gpu", "V100", "7.0"))
        for target in (A100, B200):
            assert "up to 128" in supports(call_of(size=136), target)
        assert "needs cuDNN 9.11.0 or newer" in supports(call, Target("gpu", "NVIDIA B300", "10.3"))


def test_versions_of_cudnn(monkeypatch):
    known = {"jax-cuda13-plugin": "0.11.2", "nvidia-cudnn-cu13": "9.10.1.4"}

    def version(name):
        if name not in known:
            raise _call.importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(_call.importlib.metadata, "version", version)
    assert _call.installed_version() == (9, 10, 1)
    assert "install 9.10.2 or newer" in capability.supports_forward(call_of(), H200)
    known["nvidia-cudnn-cu13"] = "9.19.0.56"
    assert capability.supports_forward(call_of(), Target("gpu", "NVIDIA B300", "10.3")) is None
    del known["jax-cuda13-plugin"]
    assert _call.installed_version() is None


def test_gradients_need_an_order_or_a_permission(monkeypatch):
    call, lse = call_of(), call_of(return_lse=True)
    assert capability.supports_forward(lse, H200) is None
    assert "no gradient of the log-sum-exp" in capability.supports_backward(lse, H200)
    for odd in (call_of(1), call_of(33, 64), call_of(64, 33), call_of(64, 33, causal=True)):
        assert "even numbers only" in capability.supports_backward(odd, H200)
    assert capability.supports_backward(call_of(64, 97, causal=True), H200) is None
    monkeypatch.delenv(capability.ANY_ORDER)
    assert "EJKERNEL_NONDETERMINISTIC=1 permits that" in capability.supports_backward(call, H200)
    assert capability.supports_forward(call, H200) is None
    for flags, ordered in (
        ("--xla_foo=1 --xla_gpu_exclude_nondeterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=1 --xla_foo=1", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_of_another_kind=true", False),
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert (capability.supports_backward(call, H200) is None) == ordered, flags
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exclude_nondeterministic_ops=true")
    assert "needs cuDNN 9.18.0 or newer" in capability.supports_backward(call, B200)


def test_needs_no_library_and_is_no_default_for_many_tokens(monkeypatch):
    from ejkernel_cuda import _library

    monkeypatch.setattr(_library, "library_problem", lambda: "the library was not built")
    few, many = (jax.ShapeDtypeStruct((2, tokens, 4, 64), jnp.bfloat16) for tokens in (2048, 4096))
    with ejkernel.use(target=H200):
        assert ejkernel.explain("flash_attention", many, many, many, platform=NAME).chosen == NAME
        assert ejkernel.explain("flash_attention", few, few, few).chosen == NAME
        assert ejkernel.explain("flash_attention", many, many, many).chosen != NAME

"""`flash_attention` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.flash_attention import reference
from ejkernel.operations.flash_attention.cases import CASES
from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.operations.flash_attention.ranges import tile_ranges
from ejkernel.plugin import Target
from ejkernel.testing.checks import relative_error, widened
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._versions import version_problem
from ejkernel_triton.flash_attention import capability, config, mask_params
from ejkernel_triton.flash_attention.mask_params import mask_params_of
from ejkernel_triton.flash_attention.split_precision import split_bf16

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import TOLERATED
from ejkernel_triton.flash_attention import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
FORWARD = config.ForwardConfig(16, 16, 4, 1)
BACKWARD = config.BackwardConfig(16, 16, 4, 1, 16, 16, 4, 1)
NAMED = {case.name: case for case in CASES}
IN_PARTS = {"positions", "nan-in-masked-places", "bias-gqa", "unnormalised-sinks"}


def canonical(arrays, options=None):
    """A call whose residuals are saved, and its arrays."""
    bound = OPERATION.canonicalise(**arrays, **(options or {}))
    inputs = FlashAttentionInputs(*(None if value is None else jnp.asarray(value) for value in bound.inputs))
    return dataclasses.replace(bound.call, save_residuals=True), inputs


def cotangents_of(call, outputs, seed=1):
    rng = np.random.default_rng(seed)
    d_out = jnp.asarray(rng.standard_normal(outputs.out.shape), outputs.out.dtype)
    d_lse = jnp.where(outputs.lse == -jnp.inf, 0, rng.standard_normal(outputs.lse.shape)) if call.return_lse else None
    return FlashAttentionOutputs(d_out, None if d_lse is None else d_lse.astype(jnp.float32))


def check(call, inputs, forward=FORWARD, backward=BACKWARD, limit=3e-6):
    """Both phases against the reference."""
    outputs = kernel.forward(call, inputs, forward)
    with np.errstate(all="ignore"):
        exact = reference.forward(call, widened(inputs))
        cotangents = cotangents_of(call, outputs)
        wanted = reference.backward(call, widened(inputs), exact, widened(cotangents))
    assert relative_error(outputs.out, exact.out, floor=1e-3) < limit
    assert relative_error(outputs.lse, exact.lse, floor=1e-3) < max(limit / 10, 1e-6)
    got = kernel.backward(call, inputs, outputs, cotangents, backward)
    for name, value, exact_value in zip(inputs._fields, got, wanted, strict=True):
        assert (value is None) == (exact_value is None), name
        if value is not None:
            assert relative_error(value, exact_value, floor=1e-3) < limit, name
            assert value.dtype == getattr(inputs, name).dtype


@pytest.mark.parametrize(
    "name",
    [
        "gqa-causal-tail", "bottom-right-empty-rows", "chunk-causal", "prefix-window", "positions", "segments-positions",
        "nan-in-masked-places", "nan-under-mask", "mask-heads", "bias-gqa", "bias-1x1x13x1", "bias-2x1x1x21",
        "bias-minus-infinity-capped", "sinks-several", "sinks-empty-rows", "unnormalised-sinks", "no-keys", "no-queries",
        "one-query", "everything",
    ],
)  # fmt: skip
def test_numbers_in_the_interpreter(interpreted, monkeypatch, name):
    """Some in parts, the others with single products, which are as exact in the interpreter and several times as fast."""
    if name not in IN_PARTS:
        monkeypatch.setattr(mask_params, "MAX_SPLIT_WIDTH", 0)
    case = NAMED[name]
    check(*canonical(case.arrays(np.random.default_rng(0)), case.options))


def test_parts_are_the_whole_number():
    """All 24 bits, from the smallest whose lowest part is a normal number to the largest."""
    rng = np.random.default_rng(5)
    numbers = (rng.uniform(-2, 2, 4000) * 2.0 ** rng.integers(-100, 127, 4000)).astype(np.float32)
    numbers = np.concatenate([numbers, np.float32([0, -0.0, 1e4, 1e-30, np.finfo(np.float32).max, np.finfo(np.float32).min])])
    bf16_terms = np.asarray(jax.jit(split_bf16)(numbers[:, None]), np.float64)
    assert bf16_terms.shape == (len(numbers), 3, 1)
    np.testing.assert_array_equal(bf16_terms.sum(1)[:, 0], numbers.astype(np.float64))
    special = np.asarray(split_bf16(jnp.float32([[np.inf, -np.inf, np.nan]])), np.float32)
    np.testing.assert_array_equal(special, [[[np.inf, -np.inf, np.nan], [0, 0, 0], [0, 0, 0]]])


def test_float32_is_multiplied_as_float32():
    """In parts on tensor cores, without them where no tile in parts fits; rounded only where that is asked for."""

    def form(size, precision, dtype="float32"):
        found = mask_params_of(call_of(64, 2, 2, size, dtype, precision=precision)[0])
        return found.bf16_terms, found.precision

    assert [form(64, wish)[0] for wish in (None, "highest", "high", "default")] == [3, 3, 3, 1]
    assert form(64, "default") == (1, "tf32")
    assert [form(size, None) for size in (256, 257, 512)] == [(3, "ieee"), (1, "ieee"), (1, "ieee")]
    assert form(512, "high") == (1, "tf32x3")
    assert form(64, None, "bfloat16") == (1, "ieee")


@pytest.mark.parametrize("size", [1e4, 1e-12])
def test_parts_of_large_and_of_tiny_numbers(interpreted, size):
    """Values over ten orders of magnitude: errors are those of float32 in every row."""
    rng = np.random.default_rng(6)
    arrays = {name: rng.standard_normal((1, 40, 1, 32)).astype(np.float32) for name in ("query", "key", "value")}
    arrays["value"] *= np.float32(size) * 10.0 ** rng.uniform(-10, 0, (1, 40, 1, 1)).astype(np.float32)
    call, inputs = canonical(arrays, {"causal": True})
    out = np.asarray(kernel.forward(call, inputs, FORWARD).out, np.float64)
    exact = reference.forward(call, widened(inputs)).out
    rows = np.linalg.norm(out - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert rows.max() < 2e-6


def test_infinite_logits_in_parts(interpreted):
    """A key with an infinity has a weight of 0 where its logit is -inf, although the parts of what it meets hold zeros."""
    rng = np.random.default_rng(7)
    arrays = {name: rng.standard_normal((1, 24, 1, 16)).astype(np.float32) for name in ("query", "key", "value")}
    arrays["query"][..., 3] = -1.0
    arrays["key"][0, 5, 0, 3] = np.inf
    call, inputs = canonical(arrays)
    out = np.asarray(kernel.forward(call, inputs, FORWARD).out)
    others = {name: array if name == "query" else np.delete(array, 5, 1) for name, array in arrays.items()}
    other_call, other_inputs = canonical(others)
    exact = reference.forward(other_call, widened(other_inputs)).out
    assert relative_error(out, exact, floor=1e-3) < 2e-6


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_half_precision(interpreted, dtype, limit):
    rng = np.random.default_rng(2)
    shapes = {"query": (1, 33, 4, 20), "key": (1, 40, 2, 20), "value": (1, 40, 2, 24)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    check(*canonical(arrays, {"causal": True}), limit=limit)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("block_q", "block_k"), [(16, 32), (32, 16), (64, 32)])
def test_blocks_do_not_change_the_numbers(interpreted, monkeypatch, block_q, block_k, overlap):
    """Tiles before, within and after the whole ones, and lengths that are no multiple of any block."""
    monkeypatch.setattr(mask_params, "MAX_SPLIT_WIDTH", 0)
    rng = np.random.default_rng(3)
    shapes = {"query": (1, 70, 2, 16), "key": (1, 70, 1, 16), "value": (1, 70, 1, 16)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    call, inputs = canonical(arrays, {"causal": True, "sliding_window": (45, 0), "logits_soft_cap": 5.0})
    forward = config.ForwardConfig(block_q, block_k, 4, 1, overlap, always_mask=not overlap and block_q == 16)
    check(call, inputs, forward, config.BackwardConfig(block_k, block_q, 4, 1, block_q, block_k, 4, 1, separate_dk_dv=overlap))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("splits", [2, 4, 16])
@pytest.mark.parametrize("name", ["gqa-causal-tail", "prefix-window", "positions", "nan-in-masked-places", "dropout-causal"])
def test_splits_of_the_key_gradient_do_not_change_the_numbers(interpreted, monkeypatch, name, splits, separate):
    """Of heads, then of queries, some of which are left without any."""
    monkeypatch.setattr(mask_params, "MAX_SPLIT_WIDTH", 0)
    case = NAMED[name]
    call, inputs = canonical(case.arrays(np.random.default_rng(0)), case.options)
    check(call, inputs, backward=dataclasses.replace(BACKWARD, key_splits=splits, separate_dk_dv=separate))


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "options", "splits"),
    [
        (8192, 128, (64, 4), {}, 32),
        (32768, 512, (64, 4), {}, 8),
        (8192, 128, (4, 4), {}, 16),
        (8192, 128, (4, 4), {"sliding_window": (1023, 0)}, 2),
        (512, 128, (4, 4), {}, 1),
        (8192, 8192, (64, 4), {}, 1),
        (8192, 0, (64, 4), {}, 1),
    ],
)
def test_the_key_gradient_of_few_keys_is_split(queries, keys, heads, options, splits):
    shapes = {"query": (1, queries, heads[0], 128), "key": (1, keys, heads[1], 128), "value": (1, keys, heads[1], 128)}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    call = OPERATION.canonicalise(**arrays, **options).call
    found = config.backward_space(call, H200)
    assert found[0].key_splits == splits
    assert {each.key_splits for each in found} >= ({splits // 2, splits * 2} if splits > 1 else {1})


def test_whole_tiles_see_what_is_not_finite(interpreted):
    """NaN reaches every query that sees it, in tiles without masks too, and no other."""
    rng = np.random.default_rng(4)
    arrays = {name: rng.standard_normal((1, 48, 1, 16)).astype(np.float32) for name in ("query", "key", "value")}
    arrays["value"][0, 20] = np.nan
    call, inputs = canonical(arrays, {"causal": True})
    out = np.asarray(kernel.forward(call, inputs, FORWARD).out)[0, :, 0]
    np.testing.assert_array_equal(np.isnan(out).all(1), np.arange(48) >= 20)
    np.testing.assert_array_equal(np.isnan(out).any(1), np.arange(48) >= 20)


def test_dropout_is_the_rule_of_the_operation(interpreted):
    """The reference drops what `dropout.bits` says."""
    case = NAMED["dropout-causal"]
    call, inputs = canonical(case.arrays(np.random.default_rng(0)), case.options)
    check(call, inputs)


def test_ranges_of_packed_segments():
    """The tiles of three sequences of 32, 16 and 14 tokens and 2 of padding, in blocks of 16, by hand."""
    segments = jnp.asarray(np.concatenate([np.zeros(32), np.ones(16), np.full(14, 2), np.full(2, -1)]), jnp.int32)[None]
    arrays = {name: jnp.zeros((1, 64, 1, 16)) for name in ("query", "key", "value")}
    call, inputs = canonical({**arrays, "query_segments": segments, "key_segments": segments})
    found = 16 * np.asarray(tile_ranges(call, inputs, 16, 16, by_key=False))
    np.testing.assert_array_equal(found, [[[0, 0, 32, 32], [0, 0, 32, 32], [32, 32, 48, 48], [48, 48, 48, 64]]])
    call, inputs = canonical({**arrays, "query_segments": segments, "key_segments": segments}, {"causal": True})
    found = 16 * np.asarray(tile_ranges(call, inputs, 16, 16, by_key=True))
    np.testing.assert_array_equal(found, [[[0, 16, 32, 32], [16, 16, 16, 32], [32, 32, 32, 48], [48, 48, 48, 64]]])


def call_of(length, heads, key_heads, size, dtype="bfloat16", value_size=None, bias=None, **options):
    """A call of this shape, and its arrays' shapes."""
    shapes = ((heads, size), (key_heads, size), (key_heads, value_size or size))
    arrays = {
        name: jax.ShapeDtypeStruct((1, length, *shape), dtype)
        for name, shape in zip(("query", "key", "value"), shapes, strict=True)
    }
    if bias is not None:
        arrays["bias"] = jax.ShapeDtypeStruct(bias, dtype)
    call = OPERATION.canonicalise(**arrays, **options).call
    return dataclasses.replace(call, save_residuals=True), FlashAttentionInputs(**arrays)


def both_phases(call, inputs, target):
    """Launch what the heuristic picks."""

    def both(inputs):
        outputs = kernel.forward(call, inputs, config.forward_heuristic(call, target))
        cotangents = FlashAttentionOutputs(outputs.out)
        return kernel.backward(call, inputs, outputs, cotangents, config.backward_heuristic(call, target))

    jax.eval_shape(both, inputs)


@pytest.mark.parametrize(
    ("number", "bias"), [(80, (1, 2, 4090, 4090)), (90, (1, 2, 4090, 4090)), (100, (1, 2, 4090, 4090)), (90, (1, 1, 1, 4090))]
)
def test_a_bias_costs_little(recorder, number, bias):
    """By pair it is loaded in vectors, and none has the compiler compute weights a second time, in the layout of its load."""
    both_phases(*call_of(4090, 2, 2, 64, bias=bias, causal=True), Target("gpu", "", f"{number // 10}.0"))
    names = [c.kernel.fn.__name__ for c in recorder.compilations]
    assert names == ["forward_kernel", "key_gradient_kernel", "query_gradient_kernel", "tile_gradient_kernel"]
    for compilation in recorder.compilations:
        compiled = compilation.compile(number)
        weights = set(re.findall(r"math\.exp2 .*(tensor<\d+x\d+xf32, .*>)", compiled.asm["ttgir"]))
        assert len(weights) == 1, weights
        assert testing.resources(compiled).spilling < TOLERATED
        if bias[2] > 1:
            assert not re.search(r"(ld|st)\.global\.b16", compiled.asm["ptx"])


@pytest.mark.parametrize("number", [80, 90, 100])
def test_compiles_into_what_the_device_has(recorder, number):
    """The heuristic's kernels: within shared memory, on tensor cores (by warpgroups on 9.0), with 16-byte loads."""
    target = Target("gpu", "", f"{number // 10}.0")
    both_phases(*call_of(4096, 8, 2, 64, causal=True), target)
    names = [c.kernel.fn.__name__ for c in recorder.compilations]
    assert names == ["forward_kernel", "key_gradient_kernel", "query_gradient_kernel"]
    product = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[number]
    for compilation in recorder.compilations:
        compiled = compilation.compile(number)
        assert f".target sm_{number}" in compiled.asm["ptx"]
        assert product in compiled.asm["ptx"]
        assert compiled.metadata.shared <= shared_memory_limit(target)
        assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "copies of 16 bytes by definition"


SHAPES = [
    (4096, 8, 2, 128, {"causal": True}),
    (4096, 8, 8, 128, {}),
    (4096, 8, 8, 64, {"causal": True, "sliding_window": 127}),
    (2048, 4, 4, 256, {"causal": True, "logits_soft_cap": 50.0}),
    (2048, 4, 4, 192, {"value_size": 128}),
    (512, 4, 1, 512, {}),
    (512, 4, 4, 80, {"dtype": "float32"}),
    (17, 4, 4, 37, {"causal": True}),
    (1, 4, 4, 128, {"causal": True}),
]


@pytest.mark.parametrize(("length", "heads", "key_heads", "size", "options"), SHAPES)
@pytest.mark.parametrize("compute_capability", ["8.0", "8.6", "9.0"])
def test_configs_are_legal_and_few(length, heads, key_heads, size, options, compute_capability):
    target = Target("gpu", "", compute_capability)
    call, _ = call_of(length, heads, key_heads, size, **options)
    forwards, backwards = config.forward_space(call, target), config.backward_space(call, target)
    assert forwards[0] == config.forward_heuristic(call, target)
    assert backwards[0] == config.backward_heuristic(call, target)
    assert len(set(forwards)) == len(forwards) <= 14
    assert len(set(backwards)) == len(backwards) <= 20
    itemsize = 6 if call.query.dtype == "float32" else 2
    for choice in forwards:
        tiles = choice.block_q * size + choice.num_stages * choice.block_k * (size + call.value.shape[3])
        assert tiles * itemsize <= shared_memory_limit(target), choice
        assert choice.block_q <= max(16, 2 * length), choice


def loss(query, key, value):
    return ejkernel.flash_attention(query, key, value, causal=True, platform="triton").astype(jnp.float32).sum()


@needs_jax_triton
def test_lowers_for_cuda():
    _, inputs = call_of(256, 4, 2, 64)
    with ejkernel.use(target=H200):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*inputs[:3])
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 3
    assert "ejkernel.flash_attention[triton]" in text
    assert "ejkernel.flash_attention.backward[triton]" in text


@needs_jax_triton
def test_memory_grows_with_the_length_only():
    """No array of the lowered program has T x S elements."""
    length = 4096
    _, inputs = call_of(length, 2, 2, 64)
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*inputs[:3]).lower(lowering_platforms=("cuda",)).as_text()
    assert f"{length}x{length}" not in text


def test_supports_refuses_with_numbers():
    call, _ = call_of(64, 4, 2, 64)

    def ask(target, supports=capability.supports_forward, **changes):
        return supports(dataclasses.replace(call, **changes), target)

    assert "has 7.5" in ask(Target("gpu", "Tesla T4", "7.5"))
    assert "key is float64" in ask(H200, key=ArraySpec((1, 64, 2, 64), "float64"))
    wide_head = ArraySpec((1, 64, 4, 640), "bfloat16")
    assert "640 is above 512" in ask(H200, query=wide_head)
    assert "640 is above 512" in ask(H200, value=ArraySpec((1, 64, 2, 640), "bfloat16"))
    assert str(2**28) in ask(H200, query=ArraySpec((1, 2**28, 4, 64), "bfloat16"))
    assert str(2**30) in ask(H200, query_offset=2**30)
    assert "2048 sinks" in ask(H200, softmax_aux=ArraySpec((1, 4, 2048), "bfloat16"))
    assert "programs" in ask(H200, query=ArraySpec((2**16, 2**20, 4, 64), "bfloat16"))
    bias = ArraySpec((1, 8, 2**18, 2**18), "bfloat16")
    assert str(2**31) in ask(H200, capability.supports_backward, bias=bias)
    assert str(2**31) not in (ask(H200, bias=bias) or "")


@needs_jax_triton
def test_supports_admits_what_it_should():
    call, _ = call_of(64, 4, 2, 64)
    for target in (H200, Target("gpu", "", "8.0"), Target("gpu", "", "10.0")):
        assert capability.supports_forward(call, target) is None
        assert capability.supports_backward(call, target) is None

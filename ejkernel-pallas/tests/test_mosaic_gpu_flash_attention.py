"""`flash_attention` on Hopper GPUs: numbers in Pallas's interpreter, programs as they are lowered for CUDA, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import pkgutil
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from ejkernel.call.records import given_fields
from ejkernel.operations.flash_attention import reference
from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionOutputs
from ejkernel.plugin import Target
from ejkernel.testing.checks import relative_error
from ejkernel_pallas._plugin import ejkernel_plugin
from ejkernel_pallas.mosaic_gpu.flash_attention import capability, config, kernel, mask_params
from ejkernel_pallas.mosaic_gpu.flash_attention.tile_scheduler import make_scheduler

HOPPER = Target("gpu", "NVIDIA H200", "9.0")
ONE_CONSUMER = config.ForwardConfig(
    block_k=64, num_stages=2, warpgroups=1, overlap=True, ping_pong=False, query_in_registers=False, persistent=False
)
PERSISTENT = dataclasses.replace(ONE_CONSUMER, warpgroups=2, ping_pong=True, query_in_registers=True, persistent=True)
IN_TURN = dataclasses.replace(ONE_CONSUMER, block_k=128, overlap=False)
ONE_CONSUMER_BACK = config.BackwardConfig(
    key_block_q=64,
    key_num_stages=2,
    key_warpgroups=1,
    separate_dk_dv=False,
    key_splits=1,
    query_block_k=64,
    query_num_stages=2,
    query_warpgroups=1,
)
APART = dataclasses.replace(ONE_CONSUMER_BACK, separate_dk_dv=True, query_num_stages=1)
needs_cuda = pytest.mark.skipif(
    not any(re.fullmatch(r"jax_cuda\d+_plugin", module.name) for module in pkgutil.iter_modules()),
    reason="Mosaic GPU lowers with a part of jax's CUDA plugin: pip install jax-cuda13-plugin",
)


def problem(
    queries: int,
    keys: int,
    heads: int = 2,
    key_heads: int = 1,
    size: int = 64,
    value_size: int = 64,
    dtype: Any = jnp.bfloat16,
    extra: Mapping[str, Any] | None = None,
    poison: int = 0,
    dropped: int = 0,
    batch: int = 1,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Call, inputs, cotangents; the last `poison` keys and values are NaN, the last `dropped` queries and output gradients too."""
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> Any:
        return np.asarray(rng.standard_normal(shape), np.float32)

    key, value = normal(batch, keys, key_heads, size), normal(batch, keys, key_heads, value_size)
    if poison:
        key[:, -poison:], value[:, -poison:] = np.nan, np.nan
    query = normal(batch, queries, heads, size)
    if dropped:
        query[:, -dropped:] = np.nan
    arrays = {"query": jnp.asarray(query, dtype)}
    arrays |= {"key": jnp.asarray(key, dtype), "value": jnp.asarray(value, dtype), **(extra or {})}
    bound = OPERATION.canonicalise(**arrays, **options, return_lse=True)
    d_out = normal(batch, queries, heads, value_size)
    if dropped:
        d_out[:, -dropped:] = np.nan
    cotangents = FlashAttentionOutputs(jnp.asarray(d_out, dtype), jnp.asarray(normal(batch, queries, heads)))
    return bound.call, bound.inputs, cotangents


def wide(values: Any) -> Any:
    """Floats as float64, NaN as 0: it is where no result may depend on it."""

    def one(value: Any) -> Any:
        return (
            np.nan_to_num(np.asarray(value, np.float64), posinf=np.inf, neginf=-np.inf)
            if jnp.issubdtype(value.dtype, jnp.floating)
            else np.asarray(value)
        )

    return type(values)(*(None if value is None else one(value) for value in values))


def check(made: tuple[Any, Any, Any], forward: Any = None, backward: Any = None, *, races: bool = False) -> None:
    """Outputs and gradients against the float64 reference, and no race where races are looked for."""
    call, inputs, cotangents = made
    assert capability.supports_forward(call, HOPPER) in (None, kernel_needs())
    forward = forward or config.forward_heuristic(call, HOPPER)
    backward = backward or config.backward_heuristic(call, HOPPER)
    params = mosaic_gpu.InterpretGPUParams(detect_races=races)
    said = io.StringIO()
    with mosaic_gpu.force_gpu_interpret_mode(params), contextlib.redirect_stdout(said):
        outputs = jax.block_until_ready(kernel.forward(call, inputs, forward))
        gradients = jax.block_until_ready(kernel.backward(call, inputs, outputs, cotangents, backward))
    assert "RACE" not in said.getvalue()
    limit = 4e-3 if call.query.dtype == "bfloat16" else 6e-4
    wanted = reference.forward(call, wide(inputs))
    assert relative_error(outputs.out, wanted.out) <= limit
    assert relative_error(outputs.lse, wanted.lse) <= 1e-5
    gradients_wanted = reference.backward(call, wide(inputs), wanted, wide(cotangents))
    for name, got, want in zip(inputs._fields, gradients, gradients_wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert (got.shape, got.dtype) == (getattr(inputs, name).shape, getattr(inputs, name).dtype)
            assert (
                relative_error(got, want) <= (8 if name == "softmax_aux" else 2) * limit
            )  # a sink's is what is left of a long sum


def bias(*shape: int, dtype: Any = jnp.bfloat16, holes: float = 0.0, hidden: int = 0) -> dict[str, Any]:
    """Of this shape; that share of pairs, the third query of the first head and the last `hidden` keys are -inf."""
    rng = np.random.default_rng(5)
    values = np.asarray(rng.standard_normal(shape), np.float32)
    if holes:
        values[rng.random(shape) < holes] = -np.inf
        values[0, 0, 2:3] = -np.inf
    if hidden:
        values[..., -hidden:] = -np.inf
    return {"bias": jnp.asarray(values, dtype)}


def kernel_needs() -> str | None:
    """What a machine without jax's CUDA plugin is told."""
    from ejkernel_pallas.mosaic_gpu._device import version_problem

    return version_problem()


def segments(queries: int) -> dict[str, Any]:
    ids = np.repeat([0, 1, -1], [queries // 2, queries - queries // 2 - 11, 11]).astype(np.int32)[None]
    return {"query_segments": jnp.asarray(ids), "key_segments": jnp.asarray(ids)}


def positions(length: int) -> dict[str, Any]:
    places = jnp.asarray(np.random.default_rng(0).permutation(length).astype(np.int32)[None])
    return {"query_positions": places, "key_positions": places, "key_lengths": jnp.asarray([length - 17], jnp.int32)}


@pytest.mark.parametrize(("forward", "backward"), [(PERSISTENT, None), (IN_TURN, APART)], ids=["persistent", "in turn"])
def test_causal_numbers_and_races(forward: Any, backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", 3)
    check(problem(131, 203, causal=True), forward, backward, races=True)


@pytest.mark.parametrize(
    "changed",
    [dict(persistent=True, warpgroups=2), dict(warpgroups=3), dict(persistent=True, warpgroups=4, num_stages=4)],
    ids=["persistent", "one by one", "four consumers"],
)
def test_heads_that_are_rows_of_one_consumer(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", 2)
    made = problem(43, 50, 16, 2, causal=True, sliding_window=(20, 0))
    assert config.can_pack_gqa(made[0])
    check(made, dataclasses.replace(ONE_CONSUMER, pack_gqa=True, **changed), ONE_CONSUMER_BACK, races=True)


def test_packed_heads_meet_fewer_keys() -> None:
    """Columns that are computed for each row of a block far from both ends, with two consumers: 16 tokens of 8 heads, or 128."""
    call, _, _ = problem(2048, 2048, 8, 1, causal=True, sliding_window=(127, 0))
    known = mask_params.mask_params_of(call)

    def columns(tokens: int) -> float:
        ranges = [known.key_range(first, first + tokens - 1, 64) for first in range(512, 1024, tokens)]
        return float(np.mean([64 * (int(high) - int(low)) for low, _, _, high in ranges]))

    assert (columns(16), columns(128)) == (192, 256)


def test_heads_are_packed_where_rows_of_a_consumer_can_be() -> None:
    def packs(heads: int, key_heads: int, **options: Any) -> bool:
        call = problem(70, 70, heads, key_heads, **options)[0]
        return any(chosen.pack_gqa for chosen in config.forward_space(call, HOPPER))

    narrow = dict(causal=True, sliding_window=(20, 0))
    assert packs(8, 1, **narrow) and packs(64, 2, **narrow)
    assert not packs(4, 1, **narrow) and not packs(24, 1, **narrow) and not packs(8, 1, causal=True)
    assert not packs(8, 1, **narrow, extra=segments(70))
    assert not packs(8, 1, **narrow, softmax_aux=np.zeros(8, np.float32))
    assert not packs(8, 1, **narrow, extra=bias(1, 1, 70, 70))


CASES: Mapping[str, Mapping[str, Any]] = {
    "sinks, window, soft cap, rows without keys": dict(
        made=(150, 70),
        dtype=jnp.float16,
        causal=True,
        causal_alignment="bottom_right",
        sliding_window=(40, 0),
        logits_soft_cap=3.0,
        softmax_aux=np.array([0.5, -1.0], np.float32),
    ),
    "segments, padding of NaN": dict(made=(140, 140), causal=True, extra=segments(140), poison=11, dropped=11),
    "segments, padding of NaN, nothing to pad": dict(made=(128, 128), heads=1, extra=segments(128), poison=11, dropped=11),
    "prefix, narrow value, negative scale": dict(
        made=(80, 100), size=128, value_size=64, causal=True, prefix=70, softmax_scale=-0.2
    ),
    "soft cap, window, rows without keys": dict(
        made=(150, 70), causal=True, causal_alignment="bottom_right", sliding_window=(40, 0), logits_soft_cap=50.0
    ),
    "positions, chunk, soft cap, wide value": dict(
        made=(100, 100), heads=1, size=24, value_size=72, extra=positions(100), poison=17, chunk_size=32, logits_soft_cap=5.0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    options = dict(CASES[name])
    check(problem(*options.pop("made"), **options), ONE_CONSUMER, ONE_CONSUMER_BACK)


@pytest.mark.parametrize(("heads", "key_heads", "splits", "apart"), [(1, 1, 2, True), (2, 1, 3, False), (4, 1, 2, False)])
def test_parts_of_the_queries(heads: int, key_heads: int, splits: int, apart: bool) -> None:
    """More parts than some blocks have tiles, and parts that end within a head; tokens fill no block."""
    backward = dataclasses.replace(ONE_CONSUMER_BACK, key_splits=splits, separate_dk_dv=apart)
    check(problem(100, 70, heads, key_heads, causal=True), ONE_CONSUMER, backward, races=heads == 2)


def test_parts_of_positions_and_of_hidden_queries() -> None:
    made = problem(140, 140, extra=segments(140), poison=11, dropped=11, causal=True)
    check(made, ONE_CONSUMER, dataclasses.replace(ONE_CONSUMER_BACK, key_splits=3, key_warpgroups=2))


BIASES: Mapping[str, Mapping[str, Any]] = {
    "by pair, over keys of NaN": dict(
        made=(100, 150, 2, 1),
        batch=2,
        causal=True,
        extra=bias(1, 2, 100, 150, holes=0.2, hidden=9),
        poison=9,
        causal_alignment="bottom_right",
    ),
    "by pair of all heads, float32": dict(
        made=(131, 70, 4, 2), extra=bias(1, 1, 131, 70, dtype=jnp.float32, holes=0.3), size=128, value_size=64
    ),
    "by pair, exact soft cap": dict(
        made=(70, 100), dtype=jnp.float16, logits_soft_cap=3.0, extra=bias(1, 2, 70, 100, dtype=jnp.float16, holes=0.3)
    ),
    "by pair, soft cap over keys of NaN": dict(
        made=(70, 100), logits_soft_cap=3.0, extra=bias(1, 1, 70, 100, holes=0.3, hidden=9), poison=9
    ),
    "by key, soft cap over keys of NaN": dict(
        made=(100, 70, 2, 1), batch=2, logits_soft_cap=3.0, extra=bias(2, 1, 1, 70, hidden=9), poison=9
    ),
    "by key and head, window": dict(made=(100, 70, 4, 2), causal=True, sliding_window=(30, 0), extra=bias(1, 4, 1, 70)),
    "by query, sinks": dict(made=(100, 70), softmax_aux=np.array([0.5, -1.0], np.float32), extra=bias(1, 2, 100, 1)),
    "one number": dict(made=(20, 30), batch=2, softmax_aux=np.array([0.5, -1.0], np.float32), extra=bias(1, 1, 1, 1)),
}


@pytest.mark.parametrize("name", BIASES)
def test_bias(name: str) -> None:
    options = dict(BIASES[name])
    check(problem(*options.pop("made"), **options), ONE_CONSUMER, ONE_CONSUMER_BACK, races=name.startswith("by pair, over"))


@pytest.mark.parametrize("size", [(256, 256), (192, 128)], ids=str)
def test_bias_of_wide_heads(size: tuple[int, int]) -> None:
    check(problem(70, 70, 2, 2, *size, causal=True, extra=bias(1, 2, 70, 70, holes=0.1)))


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_bias_of_segments_whose_queries_stay(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two consumers, tiles of two batches, of which each hides others; one place for every tile where gradients are apart."""
    monkeypatch.setattr(config, "MULTIPROCESSORS", 1)
    ids = np.array([[0] * 60 + [1] * 80, [0] * 120 + [-1] * 20], np.int32)
    extra = {"query_segments": ids, "key_segments": ids, **bias(1, 2, 140, 140, holes=0.1)}
    made = problem(140, 140, 2, 1, batch=2, extra=extra, causal=True)
    chosen = config.bias_gradient_config(made[0])
    assert chosen is not None and chosen.resident and config.sharing(made[0]) == (2, 1)
    forward = dataclasses.replace(ONE_CONSUMER, warpgroups=2, num_stages=1 if apart else 2)
    backward = dataclasses.replace(ONE_CONSUMER_BACK, key_warpgroups=2, query_warpgroups=2, key_splits=2)
    check(made, forward, dataclasses.replace(backward, separate_dk_dv=apart, query_num_stages=1 if apart else 2), races=apart)


def test_queries_of_a_bias_stay_where_they_fit() -> None:
    def chosen(shape: tuple[int, int, int, int], batch: int, length: int, size: int = 128) -> config.BiasGradientConfig:
        def call_of() -> Any:
            query = jnp.zeros((batch, length, 16, size), jnp.bfloat16)
            held.append(OPERATION.canonicalise(query, query, query, bias=jnp.zeros(shape, jnp.bfloat16)).call)

        jax.eval_shape(call_of)
        found = config.bias_gradient_config(held.pop())
        assert found is not None
        return found

    held: list[Any] = []
    assert chosen((1, 16, 8192, 8192), 2, 8192).resident
    assert chosen((2, 16, 4096, 4096), 2, 4096).resident
    assert not chosen((1, 16, 8192, 8192), 4, 8192).resident
    assert not chosen((1, 16, 512, 512), 2, 512).resident
    assert not chosen((2, 1, 1, 8192), 2, 8192).resident
    assert chosen((1, 16, 8192, 8192), 4, 8192, size=256).tiles.num_stages == 1


def test_one_place_of_keys_and_values() -> None:
    check(problem(64, 260), dataclasses.replace(ONE_CONSUMER, num_stages=1), ONE_CONSUMER_BACK)


def test_few_blocks_of_keys_are_divided() -> None:
    def parts_of(batch: int, length: int, heads: int, key_heads: int) -> int:
        def call_of() -> Any:
            query, key = (jnp.zeros((batch, length, count, 128), jnp.bfloat16) for count in (heads, key_heads))
            held.append(OPERATION.canonicalise(query, key, key, causal=True).call)

        jax.eval_shape(call_of)
        return config.backward_heuristic(held.pop(), HOPPER).key_splits

    held: list[Any] = []
    assert parts_of(2, 8192, 32, 8) == 1
    assert parts_of(1, 5001, 8, 2) > 1
    assert parts_of(2, 2048, 8, 2) > 1
    assert parts_of(1, 128, 2, 2) == 1


def test_consumers_of_packed_heads() -> None:
    """Four where registers suffice: not with wide heads, whose sums take more."""

    def consumers(size: int, queries: int) -> tuple[int, bool]:
        call = problem(queries, 300, 16, 2, size, size, causal=True, sliding_window=(20, 0))[0]
        chosen = config.forward_heuristic(call, HOPPER)
        return chosen.warpgroups, chosen.pack_gqa

    assert [consumers(64, 300), consumers(64, 100), consumers(128, 300)] == [(4, True), (2, True), (2, True)]


def test_queries_are_copied_ahead_where_there_is_room() -> None:
    call = problem(300, 300, 2, 1, 128, 128, extra=segments(300))[0]
    stays = config.forward_heuristic(call, HOPPER)
    assert stays.persistent and config.query_slots(call, stays) == 2
    assert config.query_slots(call, dataclasses.replace(stays, persistent=False)) == 1
    assert config.query_slots(call, dataclasses.replace(stays, num_stages=3)) == 1


def test_narrow_walks_have_programs_that_stay() -> None:
    narrow, wide = (problem(512, 512, 4, 2, causal=True, sliding_window=(left, 0))[0] for left in (127, 400))
    assert config.forward_heuristic(narrow, HOPPER) == config.ForwardConfig(
        block_k=128, num_stages=2, warpgroups=2, overlap=True, ping_pong=False, query_in_registers=False, persistent=True
    )
    assert not config.forward_heuristic(wide, HOPPER).persistent


RULES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "causal": dict(causal=True),
    "left": dict(sliding_window=(20, None)),
    "right": dict(sliding_window=(None, 20)),
    "chunk": dict(chunk_size=32),
    "prefix": dict(causal=True, prefix=30),
    "cap": dict(logits_soft_cap=5.0, causal=True),
    "segments": dict(extra=segments(140)),
    "positions": dict(extra=positions(140), heads=1),
    "positions and chunk": dict(extra=positions(140), heads=1, chunk_size=32),
    "bias by pair": dict(extra={"bias": np.zeros((1, 2, 140, 140), np.float32)}),
    "bias of keys": dict(extra={"bias": np.zeros((1, 1, 1, 140), np.float32)}),
    "bias of queries": dict(extra={"bias": np.zeros((1, 1, 140, 1), np.float32)}, causal=True),
    "packed": dict(heads=16, key_heads=2, causal=True, sliding_window=(20, 0)),
}


@needs_cuda
@pytest.mark.parametrize("name", RULES)
def test_every_rule_lowers_for_cuda(name: str) -> None:
    """With tails on both sides; Mosaic GPU has to find a layout for every value, which the interpreter does not need."""
    call, inputs, cotangents = problem(140, 140, **RULES[name])
    chosen, back = config.forward_heuristic(call, HOPPER), config.backward_heuristic(call, HOPPER)
    outputs = jax.eval_shape(lambda i: kernel.forward(call, i, chosen), inputs)
    for phase, arguments in (
        (lambda i: kernel.forward(call, i, chosen), (inputs,)),
        (lambda *a: kernel.backward(call, *a, back), (inputs, outputs, cotangents)),
    ):
        text = jax.jit(phase).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call @mosaic_gpu" in text


@needs_cuda
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", [(128, 128), (192, 128)], ids=str)
def test_lowers_for_cuda(size: tuple[int, int], biased: bool) -> None:
    keys = 500 if biased else 512
    call, inputs, cotangents = problem(512, keys, 4, 2, *size, causal=True, extra=bias(1, 4, 512, keys) if biased else None)
    lowered = jax.jit(lambda i: kernel.forward(call, i, config.forward_heuristic(call, HOPPER))).trace(inputs)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    outputs = jax.eval_shape(lambda i: kernel.forward(call, i, IN_TURN), inputs)
    chosen = config.backward_heuristic(call, HOPPER)
    lowered = jax.jit(lambda *a: kernel.backward(call, *a, chosen)).trace(inputs, outputs, cotangents)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == (3 if chosen.separate_dk_dv else 2) + biased


@needs_cuda
@pytest.mark.parametrize("causal", [True, False], ids=["equal shares", "in order"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_programs_that_stay_lower_for_cuda(causal: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more blocks than programs, which take turns by the hardware's barriers."""
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", 3)
    call, inputs, _ = problem(512, 512, 4, 2, causal=causal)
    chosen = dataclasses.replace(PERSISTENT, query_in_registers=False, overlap=overlap)
    text = jax.jit(lambda i: kernel.forward(call, i, chosen)).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


def test_spaces_fit_a_block() -> None:
    sizes = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256))
    biases = (
        {},
        *(bias(1, 1, *of, dtype=dtype) for of in ((512, 512), (1, 512), (512, 1)) for dtype in ("bfloat16", "float32")),
    )
    for size, extra in itertools.product(sizes, biases):
        call, _, _ = problem(512, 512, 4, 2, *size, causal=True, extra=extra)
        if extra:
            gradient = config.bias_gradient_config(call)
            assert gradient is not None and config.bias_gradient_bytes(call, gradient) + 1024 <= 227 * 1024
        for chosen in config.forward_space(call, HOPPER):
            assert config.forward_bytes(call, chosen) + 1024 <= 227 * 1024
        for chosen in config.backward_space(call, HOPPER):
            assert max(config.backward_bytes(call, chosen)) + 1024 <= 227 * 1024


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (dict(dtype=jnp.float32), "float32"),
        (dict(size=264), "head size is 264"),
        (dict(normalize_output=False), "normalize_output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(made: dict[str, Any], word: str) -> None:
    call, _, _ = problem(70, 70, **made)
    for supports in (capability.supports_forward, capability.supports_backward):
        assert word in (supports(call, HOPPER) or "")


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (dict(extra={"mask": jnp.ones((1, 1, 70, 70), bool)}), "mask"),
        (dict(dropout_prob=0.1, dropout_seed=0), "dropout_rate"),
        (dict(logits_dtype="bfloat16"), "logits_dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_that_are_not_accepted(made: dict[str, Any], field: str) -> None:
    call, _, _ = problem(70, 70, **made)
    assert field in given_fields(call)
    found = [
        one for one in ejkernel_plugin().implementations if one.operation == "flash_attention" and one.variant == "mosaic_gpu"
    ]
    assert {one.phase for one in found} == {"forward", "backward"}
    assert not any(OPERATION.accepts(one, field) for one in found)


def test_other_devices_are_refused() -> None:
    call, _, _ = problem(70, 70)
    for target in (Target("tpu"), Target("cpu")):
        assert "needs an NVIDIA GPU" in (capability.supports_forward(call, target) or "")
    for target in (Target("gpu"), Target("gpu", "", "8.0"), Target("gpu", "", "10.0")):
        assert "9.0" in (capability.supports_forward(call, target) or "")


def test_long_blocks_of_concurrent_heads_come_first() -> None:
    """Where four heads are at work at one time, each of their blocks is in its turn; the next four follow."""
    order = make_scheduler(64, 16, 1, share=1, bytes_per_share=2**30, reverse=False, programs=None)
    coords = [order.coord(jnp.int32(i_work)) for i_work in (0, 3, 4, 255, 256)]
    assert [(int(coord.head), int(coord.block)) for coord in coords] == [(0, 0), (3, 0), (0, 1), (3, 63), (4, 0)]


@pytest.mark.parametrize(("heads", "share"), [(32, 1), (30, 5), (64, 4), (7, 1), (1, 1)])
def test_the_last_heads_are_not_few(heads: int, share: int) -> None:
    """They would be at work alone, with long blocks and idle processors."""
    order = make_scheduler(64, heads, 1, share=share, bytes_per_share=4 * 2**20, reverse=True, programs=None)
    assert (heads - 1) % order.heads_in_l2 + 1 >= order.heads_in_l2 * 0.7


def test_programs_that_stay_have_equal_shares() -> None:
    """Of blocks under a causal mask, each of which is in one share."""
    lengths = list(range(1, 65))
    order = make_scheduler(64, 32, 1, share=1, bytes_per_share=4 * 2**20, reverse=True, programs=132, lengths=lengths)
    assert order.assignment is not None
    assignment = [column[1 : 1 + column[0]].tolist() for column in order.assignment.T]
    assert sorted(itertools.chain(*assignment)) == list(range(64 * 32))
    blocks = np.asarray(order.coord(jnp.arange(64 * 32)).block)
    work = [sum(lengths[blocks[i_work]] for i_work in share) for share in assignment]
    assert max(work) <= 1.01 * np.mean(work)
    assert (
        make_scheduler(64, 32, 1, share=1, bytes_per_share=1, reverse=True, programs=132, lengths=[7] * 64).assignment is None
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True),
        dict(causal=True, causal_alignment="bottom_right", sliding_window=(70, 0)),
        dict(causal=True, prefix=130),
        dict(sliding_window=(40, 90)),
        dict(chunk_size=96),
    ],
    ids=str,
)
def test_lengths_are_those_of_the_walks(options: dict[str, Any]) -> None:
    call, _, _ = problem(300, 420, **options)
    known = mask_params.mask_params_of(call)
    for first in range(0, 300, 128):
        low, _, _, high = known.key_range(jnp.int32(first), jnp.int32(first + 127), 64)
        assert config.key_tiles_met(call, first, 128, 64) == int(high) - int(low)


def test_a_cap_bounds_weights_where_their_range_suffices() -> None:
    def bounded(cap: float, **options: Any) -> bool:
        return mask_params.mask_params_of(problem(8, 8, logits_soft_cap=cap, **options)[0]).bounded

    assert bounded(50.0) and bounded(66.0) and not bounded(67.0)
    assert not bounded(50.0, dtype=jnp.float16) and not bounded(50.0, softmax_aux=np.zeros(2, np.float32))
    assert not mask_params.mask_params_of(problem(8, 8)[0]).bounded


def test_programs_do_not_wait_on_devices_with_fewer_multiprocessors() -> None:
    call, _, _ = problem(2048, 2048, size=128, value_size=128, causal=True)
    kinds = {"NVIDIA H200": True, "NVIDIA H100 80GB HBM3": True, "NVIDIA H100 PCIe": False, "NVIDIA H20-3e": False}
    found = {kind: config.forward_heuristic(call, Target("gpu", kind, "9.0")).persistent for kind in kinds}
    assert found == kinds

"""Attention on XLA against the float64 reference, at block sizes that cut every case into several tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from ejkernel import use
from ejkernel.call import named
from ejkernel.operations import get_operation
from ejkernel.operations.flash_attention import reference
from ejkernel.operations.flash_attention.cases import CASES
from ejkernel.operations.flash_attention.interface import FlashAttentionOutputs
from ejkernel.plugin import Target
from ejkernel_xla.flash_attention import backward, forward
from ejkernel_xla.flash_attention.config import CONFIGS, FlashAttentionConfig
from ejkernel_xla.flash_attention.masks import plan

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
SMALL = FlashAttentionConfig(block_q=8, block_k=16, block_q_backward=16, block_k_backward=8)
UNEVEN = FlashAttentionConfig(block_q=7, block_k=5, block_q_backward=5, block_k_backward=9)
OPERATION = get_operation("flash_attention")
NAMED = {case.name: case for case in CASES if not case.is_benchmark}


def is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def bind(name: str, dtype: str = "float32", **options: Any) -> Any:
    case = NAMED[name]
    arrays = case.arrays(np.random.default_rng(0))
    arrays = {key: jnp.asarray(value, dtype if is_float(value) else None) for key, value in arrays.items()}
    bound = OPERATION.canonicalise(**arrays, **case.options, **options)
    return dataclasses.replace(bound.call, save_residuals=True), bound.inputs


def direct(**arrays: Any) -> Callable[..., Any]:
    """Arrays for the entry point; the options follow, and a call with residuals and its inputs come back."""

    def canonical(**options: Any) -> Any:
        bound = OPERATION.canonicalise(**arrays, **options)
        return dataclasses.replace(bound.call, save_residuals=True), bound.inputs

    return canonical


def both_phases(call: Any, config: FlashAttentionConfig) -> Callable[..., Any]:
    def run(inputs: Any, cotangents: Any) -> Any:
        outputs = forward(call, inputs, config)
        return outputs, backward(call, inputs, outputs, cotangents, config)

    return jax.jit(run)


def cotangents_of(call: Any, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    specs = OPERATION.output_specs(call)
    lse = jnp.asarray(rng.standard_normal(specs.lse.shape), jnp.float32) if call.return_lse else None
    return FlashAttentionOutputs(jnp.asarray(rng.standard_normal(specs.out.shape), specs.out.dtype), lse)


def as_float64(values: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64) if is_float(a) else np.asarray(a), values)


def qkv(
    batch: int = 2, queries: int = 24, keys: int = 24, heads: int = 4, key_heads: int = 2, size: int = 8
) -> Mapping[str, Any]:
    rng = np.random.default_rng(3)
    key_shape = (batch, keys, key_heads, size)
    shapes = {"query": (batch, queries, heads, size), "key": key_shape, "value": key_shape}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def assert_close(got: Any, wanted: Any, allowed: float, what: str) -> None:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, what
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted), err_msg=what)
    seen = ~np.isneginf(wanted)
    assert np.isfinite(got[seen]).all(), what
    error = np.abs(got[seen] - wanted[seen]).max(initial=0)
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def largest(values: Any) -> float:
    values = np.asarray(values, np.float64)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0))


def check(name: str, config: FlashAttentionConfig, dtype: str = "float32") -> None:
    call, inputs = bind(name, dtype)
    cotangents = cotangents_of(call)
    outputs, gradients = both_phases(call, config)(inputs, cotangents)
    inputs64, cotangents64 = as_float64(inputs), as_float64(cotangents)
    outputs64 = reference.forward(call, inputs64)
    gradients64 = reference.backward(call, inputs64, outputs64, cotangents64)
    extreme = "extreme" in NAMED[name].tags
    # Logits of 1e4 are rounded by 1e-3 in float32, differently in each phase.
    tolerance = 5e-4 if extreme else TOLERANCE[dtype]
    for key, value in named(outputs):
        wanted = getattr(outputs64, key)
        assert_close(value, wanted, tolerance * largest(wanted) + 1e-30, key)
    assert {key for key, _ in named(gradients)} == {key for key, _ in named(gradients64)}
    # Some gradients are 0 by cancellation, of terms as large as the other gradients.
    terms = (1.0 if extreme else 0.1) * max(largest(value) for _, value in named(gradients64))
    for key, value in named(gradients):
        wanted = getattr(gradients64, key)
        assert value.dtype == getattr(inputs, key).dtype
        assert_close(value, wanted, tolerance * max(largest(wanted), terms) + 1e-30, f"gradient of {key}")


@pytest.mark.parametrize("name", NAMED)
def test_numbers(name: str) -> None:
    check(name, SMALL)


@pytest.mark.parametrize(
    "name", ("everything", "gqa-causal-tail", "bottom-right-empty-rows", "bias-1x2x13x21", "prefix-window")
)
@pytest.mark.parametrize("config", (UNEVEN, FlashAttentionConfig()), ids=("uneven", "default"))
def test_configs_give_the_same_numbers(name: str, config: FlashAttentionConfig) -> None:
    check(name, config)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize(
    "name", ("gqa-causal-tail", "segments", "bias-1x2x13x21", "sinks", "soft-cap", "unnormalised-sinks", "dropout")
)
def test_narrow_dtypes(name: str, dtype: str) -> None:
    check(name, SMALL, dtype)


def test_float64_is_computed_in_float64() -> None:
    with jax.enable_x64(True):
        call, inputs = bind("everything", "float64")
        cotangents = cotangents_of(call)
        outputs, gradients = both_phases(call, SMALL)(inputs, cotangents)
        inputs64, cotangents64 = as_float64(inputs), as_float64(cotangents)
        outputs64 = reference.forward(call, inputs64)
        gradients64 = reference.backward(call, inputs64, outputs64, cotangents64)
        assert_close(outputs.out, outputs64.out, 1e-13, "out")
        for key, value in named(gradients):
            assert_close(value, getattr(gradients64, key), 1e-12, key)


def test_products_that_overflow_float16() -> None:
    arrays = {name: value.astype(jnp.float16) for name, value in qkv(size=64).items()}
    arrays["query"] = arrays["query"] * 0 + 64
    arrays["key"] = arrays["key"] * 0 + 64
    call, inputs = direct(**arrays)()
    out = both_phases(call, SMALL)(inputs, cotangents_of(call))[0].out
    wanted = np.repeat(np.asarray(arrays["value"], np.float64).mean(1, keepdims=True), 2, axis=2)
    assert_close(out, np.broadcast_to(wanted, out.shape), 3e-3, "out")


class TestNotANumber:
    """What a query does not see cannot reach it, whatever it holds; what it sees does."""

    def run(self, poison: Callable[[dict[str, Any]], None], cotangent: Any = None, **options: Any) -> Any:
        arrays = {name: np.array(value) for name, value in qkv(batch=1).items()}
        poison(arrays)
        call, inputs = direct(**{name: jnp.asarray(value) for name, value in arrays.items()})(causal=True, **options)
        cotangents = cotangents_of(call)
        if cotangent is not None:
            cotangents = cotangents._replace(out=cotangents.out.at[:, cotangent].set(jnp.nan))
        return both_phases(call, SMALL)(inputs, cotangents)

    @pytest.mark.parametrize("name", ("key", "value"))
    @pytest.mark.parametrize("bad", (np.nan, np.inf))
    def test_key_reaches_the_queries_that_see_it_and_no_other(self, name: str, bad: float) -> None:
        def poison(arrays: dict[str, Any]) -> None:
            arrays[name][:, 13] = bad

        clean, clean_gradients = self.run(lambda arrays: None)
        outputs, gradients = self.run(poison)
        np.testing.assert_array_equal(outputs.out[:, :13], clean.out[:, :13])
        assert not np.isfinite(outputs.out[:, 13:]).any()
        np.testing.assert_array_equal(gradients.query[:, :13], clean_gradients.query[:, :13])

    def test_broken_query_and_cotangent_reach_only_the_keys_they_see(self) -> None:
        def poison(arrays: dict[str, Any]) -> None:
            arrays["query"][:, 9] = np.nan

        for outputs, gradients in (self.run(poison), self.run(lambda arrays: None, cotangent=9)):
            assert np.isfinite(outputs.out[:, :9]).all()
            for gradient in (gradients.key, gradients.value):
                assert np.isfinite(gradient[:, 10:]).all()
                assert np.isnan(gradient[:, :10]).all()
            assert np.isfinite(gradients.query[:, :9]).all() and np.isfinite(gradients.query[:, 10:]).all()

    def test_padding_rows_and_keys_never_leak(self) -> None:
        def poison(arrays: dict[str, Any]) -> None:
            arrays["query"][:, 20:] = np.nan
            arrays["key"][:, 20:] = np.inf
            arrays["value"][:, 20:] = np.nan

        lengths = jnp.array([20], jnp.int32)
        outputs, gradients = self.run(poison, slice(20, None), query_lengths=lengths, key_lengths=lengths)
        clean, clean_gradients = self.run(lambda arrays: None, query_lengths=lengths, key_lengths=lengths)
        np.testing.assert_array_equal(outputs.out, clean.out)
        assert largest(outputs.out[:, 20:]) == 0 and np.isneginf(outputs.lse[:, 20:]).all()
        for key, gradient in named(gradients):
            np.testing.assert_array_equal(gradient, getattr(clean_gradients, key), err_msg=key)
            assert largest(gradient[:, 20:]) == 0 and largest(gradient) > 0.1


class TestTiles:
    def call(self, length: int = 256, **options: Any) -> Any:
        return direct(**qkv(batch=1, queries=length, keys=length))(**options)

    @pytest.mark.parametrize(
        ("options", "tiles"),
        (
            ({}, 64),
            ({"causal": True}, 36),
            ({"sliding_window": (32, 0)}, 15),
            ({"sliding_window": 1}, 22),
            ({"chunk_size": 64}, 16),
            ({"chunk_size": 64, "causal": True}, 12),
            ({"causal": True, "prefix": 64}, 37),
        ),
    )
    def test_hidden_tiles_are_not_visited(self, options: Any, tiles: int) -> None:
        call, _ = self.call(**options)
        assert len(plan(call, 32, 32).tiles) == tiles

    def test_positions_given_as_arrays_visit_every_tile(self) -> None:
        call, _ = self.call(causal=True, query_positions=jnp.arange(256, dtype=jnp.int32)[None])
        assert len(plan(call, 32, 32).tiles) == 64

    def test_compiled_work_follows_the_tiles(self) -> None:
        """Loop bodies are the same size; trip counts, written in the compiled loops, are the number of tiles."""
        config = FlashAttentionConfig(32, 32, 32, 32)
        for options, tiles in (({}, 64), ({"causal": True}, 36), ({"sliding_window": (32, 0)}, 15)):
            call, inputs = self.call(**options)
            text = both_phases(call, config).lower(inputs, cotangents_of(call)).compile().as_text()
            assert text.count(f'"known_trip_count":{{"n":"{tiles}"}}') == 2, options

    @pytest.mark.parametrize("options", ({}, {"causal": True}, {"sliding_window": 16}), ids=str)
    def test_memory_is_linear_in_length(self, options: Any) -> None:
        config = FlashAttentionConfig(128, 128, 128, 128)

        def temporary(length: int) -> int:
            call, inputs = self.call(length, **options)
            compiled = both_phases(call, config).lower(inputs, cotangents_of(call)).compile()
            return compiled.memory_analysis().temp_size_in_bytes

        sizes = [temporary(length) for length in (2048, 4096, 8192)]
        assert sizes[1] <= 2.1 * sizes[0] and sizes[2] <= 2.1 * sizes[1]
        assert sizes[2] < 4 * 8192 * 8192 / 4  # a quarter of the score matrix of one head, of four

    @pytest.mark.parametrize("shape", ((1, 1, 1, 2048), (1, 1, 2048, 1), (1, 4, 1, 1)))
    def test_gradient_of_a_broadcast_bias_needs_no_dense_one(self, shape: tuple[int, ...]) -> None:
        call, inputs = direct(**qkv(batch=1, queries=2048, keys=2048), bias=jnp.zeros(shape))()
        config = FlashAttentionConfig(128, 128, 128, 128)
        compiled = both_phases(call, config).lower(inputs, cotangents_of(call)).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 2048 * 4

    def test_search_space_is_legal_and_holds_the_heuristic(self) -> None:
        for length in (0, 1, 100, 512, 2048, 32768):
            specs = {name: jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32) for name in ("query", "key", "value")}
            call = OPERATION.canonicalise(**specs, causal=True).call
            for target in (Target("cpu"), Target("gpu"), Target("tpu")):
                space = CONFIGS.search_space(call, target)
                assert CONFIGS.heuristic(call, target) in space
                assert len(set(space)) == len(space)
                assert all(min(dataclasses.astuple(config)[:4]) >= 1 for config in space)


class TestTransforms:
    @pytest.mark.parametrize("name", ("gqa-causal-tail", "sinks", "soft-cap", "bottom-right-empty-rows", "bias-1x2x13x21"))
    def test_plain_code_differentiates_itself(self, name: str) -> None:
        call, inputs = bind(name)
        cotangents = cotangents_of(call)
        gradients = both_phases(call, SMALL)(inputs, cotangents)[1]
        floats = {key: value for key, value in named(inputs) if key in OPERATION.differentiable}

        def loss(floats: Any) -> Any:
            return jnp.sum(forward(call, inputs._replace(**floats), SMALL).out * cotangents.out)

        for key, value in jax.jit(jax.grad(loss))(floats).items():
            assert_close(value, getattr(gradients, key), 2e-5 * max(largest(value), 1), key)

    @pytest.mark.parametrize("config", (FlashAttentionConfig(2, 3, 2, 2), FlashAttentionConfig()), ids=("tiles", "one-tile"))
    def test_hessian_is_finite_at_empty_rows_and_right(self, config: FlashAttentionConfig) -> None:
        arrays = qkv(batch=1, queries=5, keys=4, heads=1, key_heads=1, size=2)
        lengths = {"query_lengths": jnp.array([4], jnp.int32), "key_lengths": jnp.array([3], jnp.int32)}
        call, inputs = direct(**arrays, **lengths)(causal=True, logits_soft_cap=2.0)

        def tiled(query: Any) -> Any:
            return jnp.sum(jnp.sin(forward(call, inputs._replace(query=query), config).out))

        def dense(query: Any) -> Any:
            logits = 2.0 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", query, inputs.key) * call.softmax_scale / 2.0)
            seen = (jnp.arange(5)[:, None] >= jnp.arange(4)[None]) & (jnp.arange(4) < 3)[None] & (jnp.arange(5)[:, None] < 4)
            weights = jnp.where(seen, jnp.exp(logits), 0)
            weights = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-30)
            return jnp.sum(jnp.sin(jnp.einsum("bhts,bshv->bthv", weights, inputs.value)))

        got, wanted = jax.hessian(tiled)(inputs.query), jax.hessian(dense)(inputs.query)
        assert largest(wanted) > 1e-3
        assert_close(got, wanted, 2e-6, "hessian")

    def test_public_call_without_custom_gradients(self) -> None:
        arrays = qkv(batch=1)

        def loss(query: Any) -> Any:
            return jnp.sum(OPERATION.invoke({**arrays, "query": query}, {"causal": True}, cfg=SMALL, platform="xla") ** 2)

        wanted = jax.grad(loss)(arrays["query"])
        with use("xla", custom_gradients=False):
            derivative = jax.jvp(loss, (arrays["query"],), (arrays["query"],))[1]
        np.testing.assert_allclose(derivative, jnp.vdot(wanted, arrays["query"]), rtol=2e-5)

    def test_vmap_of_the_code_itself(self) -> None:
        call, inputs = bind("gqa-causal-tail")
        stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), inputs)
        got = jax.vmap(lambda inputs: forward(call, inputs, SMALL).out)(stacked)
        for member in range(2):
            alone = forward(call, jax.tree.map(lambda x, m=member: x[m], stacked), SMALL).out
            assert_close(got[member], alone, 1e-6, "out")


class TestSharding:
    @property
    def mesh(self) -> Any:
        kinds = (jax.sharding.AxisType.Auto,) * 2
        return jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds, devices=jax.devices()[:4])

    def loss(self, arrays: Any, config: FlashAttentionConfig = SMALL) -> Any:
        return jnp.sum(jnp.sin(OPERATION.invoke(arrays, {"causal": True}, cfg=config, platform="xla")))

    def arrays(self) -> Any:
        return {**qkv(), "bias": jnp.linspace(-1, 1, 2 * 4 * 24).reshape(2, 4, 1, 24), "softmax_aux": jnp.linspace(-1, 1, 4)}

    def specs(self) -> Any:
        rows = P("x", None, "y")
        return {"query": rows, "key": rows, "value": rows, "bias": P("x", "y"), "softmax_aux": P("y")}

    def test_jit_over_batch_and_heads_gathers_nothing(self) -> None:
        arrays, mesh = self.arrays(), self.mesh
        placed = {name: jax.device_put(value, NamedSharding(mesh, self.specs()[name])) for name, value in arrays.items()}
        compiled = jax.jit(jax.value_and_grad(self.loss)).lower(placed).compile()
        text = compiled.as_text()
        assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
        value, gradients = compiled(placed)
        wanted, wanted_gradients = jax.jit(jax.value_and_grad(self.loss))(arrays)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        for name, gradient in gradients.items():
            assert_close(gradient, wanted_gradients[name], 2e-5 * largest(wanted_gradients[name]), name)

    @pytest.mark.parametrize("config", (SMALL, FlashAttentionConfig()), ids=("tiles", "one-tile"))
    @pytest.mark.parametrize("custom", (True, False), ids=("custom-gradients", "plain"))
    def test_inside_shard_map(self, config: FlashAttentionConfig, custom: bool) -> None:
        arrays, specs = self.arrays(), self.specs()

        def local(arrays: Any) -> Any:
            return jax.lax.psum(self.loss(arrays, config), ("x", "y"))

        sharded = jax.shard_map(local, mesh=self.mesh, in_specs=(specs,), out_specs=P(), check_vma=True)
        with use("xla", custom_gradients=custom):
            value, gradients = jax.jit(jax.value_and_grad(sharded))(arrays)
        wanted, wanted_gradients = jax.jit(jax.value_and_grad(self.loss))(arrays)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        for name, gradient in gradients.items():
            assert_close(gradient, wanted_gradients[name], 2e-5 * largest(wanted_gradients[name]), name)

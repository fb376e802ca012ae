"""`delta_rule` on XLA, and its public functions."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close

import ejkernel
from ejkernel.operations import get_operation
from ejkernel.operations.delta_rule import reference
from ejkernel.operations.delta_rule.cases import arrays as made
from ejkernel.operations.delta_rule.interface import DeltaRuleInputs
from ejkernel_xla.delta_rule.config import DeltaRuleConfig
from ejkernel_xla.delta_rule.layout import Grid
from ejkernel_xla.delta_rule.products import decayed_products, unit_lower_inverse

OPERATION = get_operation("delta_rule")
CHUNKS = {"chunk_size": 16, "chunks_per_step": 2}


def problem(seed: int = 0, **kind: Any) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in made(**kind)(np.random.default_rng(seed)).items()}


def run(arrays: dict[str, Any], cfg: Any = None, **options: Any) -> Any:
    return OPERATION.invoke(arrays, {"return_state": True, **options}, platform="xla", cfg=cfg)


def value_and_gradients(arrays: dict[str, Any], cfg: Any = None, **options: Any) -> Any:
    """Results, and gradients of a projection of them, of every floating array."""
    moving = {name: value for name, value in arrays.items() if jnp.issubdtype(value.dtype, jnp.floating)}

    @jax.jit
    def pulled(moving: Any) -> Any:
        found, pull = jax.vjp(lambda values: run({**arrays, **values}, cfg, **options), moving)
        return found, pull(jax.tree.map(jnp.cos, found))[0]

    return pulled(moving)


def assert_same(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for index, pair in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)):
        assert_close(*pair, tolerance, f"leaf {index}")


def by_reference(arrays: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    bound = OPERATION.canonicalise(**arrays, return_state=True, **options)
    wide = {
        name: None if value is None else np.asarray(value, np.float64 if jnp.issubdtype(value.dtype, jnp.floating) else None)
        for name, value in bound.inputs._asdict().items()
    }
    return bound.finish(reference.forward(bound.call, DeltaRuleInputs(**wide)))


@pytest.mark.parametrize(
    ("length", "decay"), [(0, "head"), (1, "head"), (15, "head"), (16, "head"), (17, "channel"), (70, "channel")]
)
def test_forms_agree(length: int, decay: str) -> None:
    """By chunks, token by token, and by calls of one token that hand on the state; with every gradient of the first two."""
    arrays = problem(length=length, decay=decay, state=True)
    chunked = jax.jit(lambda arrays: value_and_gradients(arrays, CHUNKS))(arrays)
    by_token = jax.jit(lambda arrays: value_and_gradients(arrays, CHUNKS, use_chunked=False))(arrays)
    assert_same(chunked, by_token)
    step, state, outs = jax.jit(run), arrays["initial_state"], [jnp.zeros((2, 0, 2, 3))]
    for token in range(length):
        one = {name: value[:, token : token + 1] for name, value in arrays.items() if name != "initial_state"}
        out, state = step({**one, "initial_state": state})
        outs.append(out)
    assert_same((jnp.concatenate(outs, 1), state), chunked[0])


def test_the_general_form_by_chunks_and_by_tokens() -> None:
    arrays = problem(length=40, low_rank="ab", decay="channel", state=True)
    chunked = jax.jit(lambda arrays: value_and_gradients(arrays, CHUNKS))(arrays)
    assert_same(chunked, jax.jit(lambda arrays: value_and_gradients(arrays, CHUNKS, use_chunked=False))(arrays))
    assert {*chunked[1]} == {"query", "key", "value", "beta", "decay", "a", "b", "initial_state"}


@pytest.mark.parametrize(("chunk_size", "chunks_per_step"), [(1, 3), (5, 1), (8, 100), (32, 2), (128, 1)])
def test_every_config_gives_the_same(chunk_size: int, chunks_per_step: int) -> None:
    arrays = problem(1, batch=1, length=70, decay="channel", state=True)
    wanted = by_reference(arrays)
    got = run(arrays, DeltaRuleConfig(chunk_size, chunks_per_step))
    assert_same(got, wanted, 5e-6)


@pytest.mark.parametrize(("decay", "chunked"), [("head", True), ("channel", True), ("head", False)])
def test_memory_does_not_grow_by_a_state_per_token(decay: str, chunked: bool) -> None:
    """Forward and backward: what is kept beyond arguments and results grows by far less than a state with every token."""
    width = 32
    cfg = {"chunk_size": 32, "chunks_per_step": 1}

    def temporary(length: int) -> int:
        arrays = problem(batch=1, length=length, heads=1, width=width, channels=width, decay=decay)
        lowered = jax.jit(lambda arrays: value_and_gradients(arrays, cfg, use_chunked=chunked)).lower(arrays)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    state, tokens = 4 * width * width, 512
    growth = (temporary(2 * tokens + 1024) - temporary(tokens + 1024)) / tokens
    assert 0 <= growth < 0.75 * state, growth / state


def test_one_token_is_a_step_without_a_loop() -> None:
    arrays = problem(length=1, state=True)
    program = jax.jit(lambda arrays: value_and_gradients(arrays)).lower(arrays).as_text()
    assert "stablehlo.while" not in program
    assert "stablehlo.while" in jax.jit(run).lower(problem(length=20, state=True)).as_text()


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_decay_of_minus_infinity_is_a_new_segment(decay: str, chunked: bool) -> None:
    arrays = problem(batch=1, length=40, decay=decay, state=True)
    starts = np.array([7, 8, 23])
    ids = jnp.asarray(np.cumsum(np.isin(np.arange(40), starts)))[None]
    cut = {**arrays, "decay": arrays["decay"].at[:, starts].set(-jnp.inf)}
    (got, gradients), (wanted, expected) = (
        value_and_gradients(values, CHUNKS, use_chunked=chunked) for values in (cut, {**arrays, "seg_ids": ids})
    )
    assert_same(got, wanted)
    assert_same(gradients, expected)
    np.testing.assert_array_equal(gradients["decay"][:, starts], 0)


def test_strong_corrections_and_keys_of_any_size() -> None:
    """beta 2 on unit keys keeps lengths; longer keys make the state grow, and that is still right."""
    arrays = problem(batch=1, length=130, width=16, channels=8, strength=1.0, decay="")
    unit = {**arrays, "beta": jnp.full_like(arrays["beta"], 2.0)}
    assert_same(run(unit, use_qk_l2norm=True), by_reference(unit, use_qk_l2norm=True), 5e-6)
    longer = {**arrays, "key": 2.0 * arrays["key"]}
    wanted = by_reference(longer)
    assert np.abs(wanted[1]).max() > 50
    assert_same(run(longer), wanted, 1e-5)


def test_padding_takes_no_part() -> None:
    """Tokens with an id below 0 are as if they were not there, whatever they hold."""
    ids = np.array([-1, 0, 0, -1, -1, 0, 0, 1, -1, 1, 1, -1])
    arrays = problem(length=12, state=True)
    poisoned = {name: value if name == "initial_state" else value.at[:, ids < 0].set(jnp.nan) for name, value in arrays.items()}
    (out, state), gradients = value_and_gradients({**poisoned, "seg_ids": jnp.asarray(ids)[None]})
    kept = {name: value if name == "initial_state" else value[:, ids >= 0] for name, value in arrays.items()}
    (kept_out, kept_state), kept_gradients = value_and_gradients({**kept, "seg_ids": jnp.asarray(ids[ids >= 0])[None]})
    assert_same((out[:, ids >= 0], state), (kept_out, kept_state))
    np.testing.assert_array_equal(out[:, ids < 0], 0)
    for name, gradient in gradients.items():
        if name != "initial_state":
            np.testing.assert_array_equal(gradient[:, ids < 0], 0)
            gradient = gradient[:, ids >= 0]
        assert_close(gradient, kept_gradients[name], 2e-5, name)


def test_packed_lengths_share_one_program() -> None:
    """Any lengths of one total, traced: each sequence is what it is alone; what follows the last may hold NaN."""
    arrays = problem(batch=1, length=40, decay="channel")
    states = jax.random.normal(jax.random.key(0), (4, 2, 4, 3))
    traces = []

    @jax.jit
    def packed(arrays: Any, states: Any, bounds: Any) -> Any:
        traces.append(1)
        return value_and_gradients({**arrays, "initial_state": states, "cu_seqlens": bounds}, CHUNKS)

    for bounds in ([0, 1, 18, 18, 35], [0, 16, 32, 33, 40], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]):
        poisoned = {name: value.at[:, bounds[-1] :].set(jnp.nan) for name, value in arrays.items()}
        (out, final), gradients = packed(poisoned, states, jnp.array(bounds))
        np.testing.assert_array_equal(out[:, bounds[-1] :], 0)
        for index, (start, end) in enumerate(itertools.pairwise(bounds)):
            alone = {name: value[:, start:end] for name, value in arrays.items()}
            wanted, expected = value_and_gradients({**alone, "initial_state": states[index : index + 1]}, CHUNKS)
            assert_same((out[:, start:end], final[index : index + 1]), wanted)
            assert_close(gradients["initial_state"][index], expected["initial_state"][0], 2e-5)
            for name, value in arrays.items():
                assert_close(gradients[name][:, start:end], expected[name], 2e-5, name)
                assert value.dtype == gradients[name].dtype
                np.testing.assert_array_equal(gradients[name][:, bounds[-1] :], 0)
    assert len(traces) == 1


def test_grid_holds_the_worst_case() -> None:
    """Lengths of 2 take most chunks for their tokens."""
    for length, count in ((40, 20), (40, 4), (7, 3), (64, 64), (2, 1), (3, 9)):
        arrays = problem(batch=1, length=length)
        lengths = np.zeros(count, int)
        for token in range(length - length % 2):
            lengths[token // 2 % count] += 1
        bounds = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]))
        call = OPERATION.canonicalise(**arrays, cu_seqlens=bounds).call
        for size in (1, 4, 16):
            grid = Grid.of(call, DeltaRuleConfig(size, 3))
            assert grid.steps * grid.chunks >= sum(-(-n // grid.size) for n in lengths if n > 1)


def test_products_and_inverse() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 2, 32, 3)).astype(np.float32)
    decay = (-np.abs(rng.standard_normal((32, 3))) * rng.choice([0, 1, 60], (32, 3))).astype(np.float32)
    wanted = np.zeros((2, 32, 2, 32))
    for i in range(32):
        for j in range(i):
            factor = np.exp(decay[j + 1 : i].astype(np.float64).sum(0))
            wanted[:, i, :, j] = np.einsum("rd,wd,d->rw", x[:, i], y[:, j], factor)
    assert_close(decayed_products(jnp.einsum, jnp.asarray(x), jnp.asarray(y), jnp.asarray(decay)), wanted, 1e-6)
    for size in (1, 2, 16, 64):
        strict = np.tril(rng.standard_normal((3, size, size)), -1).astype(np.float32) / 2
        inverse = np.linalg.inv(np.eye(size) + strict.astype(np.float64))
        assert_close(unit_lower_inverse(jnp.asarray(strict)), inverse, 1e-5)
        tangent = np.tril(rng.standard_normal(strict.shape), -1).astype(np.float32)
        got = jax.jvp(unit_lower_inverse, (jnp.asarray(strict),), (jnp.asarray(tangent),))[1]
        assert_close(got, -inverse @ tangent @ inverse, 1e-5)


def test_two_byte_inputs_keep_states_in_float32() -> None:
    arrays = problem(length=70, state=True)
    narrow = {name: value.astype(jnp.bfloat16) for name, value in arrays.items()}
    out, state = run(narrow)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    wanted = by_reference(narrow)
    assert_close(state, wanted[1], 5e-6)
    assert_close(out, wanted[0], 5e-3)


# The public functions


def test_gated_delta_rule_is_the_operation() -> None:
    arrays = problem(length=20, state=True)
    for options in ({"use_chunked": False}, {"chunk_size": 8}, {"cfg": {"chunk_size": 32}}, {"reverse": True}):
        got = ejkernel.gated_delta_rule(**arrays, return_state=True, **options)
        wanted = by_reference(arrays, use_qk_l2norm=True, reverse="reverse" in options)
        assert_same(got, wanted, 5e-6)
    plain = ejkernel.gated_delta_rule(**arrays, use_qk_l2norm=False, softmax_scale=2.0)
    assert_close(plain, by_reference(arrays, softmax_scale=2.0)[0], 5e-6)
    ids = jnp.repeat(jnp.arange(4), 5)[None]
    got = ejkernel.gated_delta_rule(**arrays, seg_ids=ids, use_qk_l2norm=False)
    assert_close(got, by_reference({**arrays, "seg_ids": ids})[0], 5e-6)


def test_forms_are_different_programs() -> None:
    arrays, by_chunks = problem(length=20), {"token_by_token": False}
    programs = {
        flag: jax.jit(lambda arrays, flag=flag: ejkernel.gated_delta_rule(**arrays, use_chunked=flag, cfg=by_chunks))
        .lower(arrays)
        .as_text()
        for flag in (True, False)
    }
    assert programs[True] != programs[False]


def test_kernel_delta_attention_takes_both_decays() -> None:
    arrays = problem(length=20, decay="channel", state=True)
    got = ejkernel.kernel_delta_attention(**arrays, return_state=True)
    assert_same(got, by_reference(arrays, use_qk_l2norm=True), 5e-6)
    head = problem(length=20)
    assert_same(ejkernel.kernel_delta_attention(**head), ejkernel.gated_delta_rule(**head), 1e-7)
    with pytest.raises(ValueError, match=r"decay: got shape \(2, 20, 2, 4\), expected \[B,T,H\]"):
        ejkernel.gated_delta_rule(**arrays)


@pytest.mark.parametrize("chunk_size", [0, 1.5, True])
def test_chunk_size_is_checked(chunk_size: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="chunk_size: got"):
        ejkernel.gated_delta_rule(**problem(), chunk_size=chunk_size)


def test_chunk_size_and_cfg_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="chunk_size: got 8, expected None beside cfg"):
        ejkernel.kernel_delta_attention(**problem(), chunk_size=8, cfg={"chunk_size": 8})


def test_over_a_mesh() -> None:
    """Batch and heads split as the client does it, with a state that is there and one that is not."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    tokens, heads, states = spec("dp", None, "tp", None), spec("dp", None, "tp"), spec("dp", "tp", None, None)
    arrays = problem(length=20, state=True)
    for given in (arrays, {**arrays, "initial_state": None}):
        sharded = jax.jit(
            lambda given: ejkernel.gated_delta_rule(
                **given,
                return_state=True,
                mesh=mesh,
                in_specs=(tokens, tokens, tokens, heads, heads, states),
                out_specs=(tokens, states),
            )
        )
        assert_same(sharded(given), ejkernel.gated_delta_rule(**given, return_state=True), 1e-6)
    loss = lambda arrays: jnp.sum(jnp.sin(sharded(arrays)[0]))
    plain = lambda arrays: jnp.sum(jnp.sin(ejkernel.gated_delta_rule(**arrays)))
    assert_same(jax.jit(jax.grad(loss))(arrays), jax.jit(jax.grad(plain))(arrays), 1e-5)


def rwkv_arrays(length: int = 20) -> dict[str, Any]:
    arrays = problem(length=length, decay="channel", beta=False, low_rank="ab", state=True)
    renamed = {"r": "query", "w": "decay", "k": "key", "v": "value", "a": "a", "b": "b", "initial_state": "initial_state"}
    return {name: arrays[old] for name, old in renamed.items()}


def test_rwkv7_is_its_recurrence() -> None:
    arrays = rwkv_arrays()
    out, final = ejkernel.rwkv7(**arrays, return_state=True, softmax_scale=1.0)
    wide = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    state = wide["initial_state"]
    for token in range(20):
        r, w, k, v, a, b = (wide[name][:, token] for name in ("r", "w", "k", "v", "a", "b"))
        read = np.einsum("bhd,bhdv->bhv", b, state)
        state = np.exp(w)[..., None] * state + a[..., None] * read[:, :, None] + k[..., None] * v[:, :, None]
        assert_close(out[:, token], np.einsum("bhd,bhdv->bhv", r, state), 5e-6)
    assert_close(final, state, 5e-6)
    assert_close(ejkernel.rwkv7(**arrays), out / 2, 1e-6)


def test_rwkv7_mul_is_rwkv7_with_its_product() -> None:
    arrays = rwkv_arrays()
    kk, rate = arrays.pop("b"), jax.nn.sigmoid(arrays.pop("a"))
    got = ejkernel.rwkv7_mul(**arrays, kk=kk, a=rate, return_state=True, reverse=True)
    wanted = ejkernel.rwkv7(**arrays, a=kk * rate, b=-kk, return_state=True, reverse=True)
    assert_same(got, wanted, 1e-6)
    with pytest.raises(ValueError, match=r"a: got shape \(2, 3, 2, 4\), expected \(2, 20, 2, 4\)"):
        ejkernel.rwkv7_mul(**arrays, kk=kk, a=rate[:, :3])


def test_what_stands_after_the_last_sequence_of_rwkv7_mul() -> None:
    """Nothing of it comes through the product of kk and a, in neither direction."""
    arrays = rwkv_arrays()
    given = {name: arrays[name][:1, :9] for name in ("r", "w", "k", "v", "a")} | {"kk": arrays["b"][:1, :9]}

    def out_and_gradients(arrays: dict[str, Any]) -> Any:
        found, pull = jax.vjp(lambda values: ejkernel.rwkv7_mul(**values, cu_seqlens=jnp.array([0, 3, 7])), arrays)
        return found, pull(jnp.cos(found))[0]

    poisoned = {name: value.at[:, 7:].set(jnp.nan) for name, value in given.items()}
    assert_same(out_and_gradients(poisoned), out_and_gradients(given), 0)


def test_the_delta_rule_is_a_case_of_rwkv7() -> None:
    arrays = problem(length=20, decay="channel", state=True)
    wanted = ejkernel.kernel_delta_attention(**arrays, use_qk_l2norm=False, return_state=True)
    beta, key, decay = arrays["beta"][..., None], arrays["key"], arrays["decay"]
    got = ejkernel.rwkv7(
        r=arrays["query"],
        w=decay,
        k=beta * key,
        v=arrays["value"],
        a=-beta * key,
        b=jnp.exp(decay) * key,
        initial_state=arrays["initial_state"],
        return_state=True,
    )
    assert_same(got, wanted, 5e-6)


def test_class_forms() -> None:
    executor = ejkernel.create_default_executor()
    arrays = problem(length=5)
    np.testing.assert_array_equal(executor(ejkernel.GatedDeltaRule(), **arrays), ejkernel.gated_delta_rule(**arrays))
    np.testing.assert_array_equal(
        executor(ejkernel.KernelDeltaAttention(), **arrays), ejkernel.kernel_delta_attention(**arrays)
    )
    rwkv = rwkv_arrays(5)
    np.testing.assert_array_equal(executor(ejkernel.RWKV7(), **rwkv), ejkernel.rwkv7(**rwkv))
    rwkv["kk"] = rwkv.pop("b")
    np.testing.assert_array_equal(executor(ejkernel.RWKV7Mul(), **rwkv), ejkernel.rwkv7_mul(**rwkv))


def test_explain_names_the_operation() -> None:
    arrays = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in problem(length=20).items()}
    explanation = ejkernel.explain("gated_delta_rule", **arrays)
    assert explanation.forward.chosen.id == "xla"
    assert explanation.forward.config.token_by_token and not explanation.backward.config.token_by_token

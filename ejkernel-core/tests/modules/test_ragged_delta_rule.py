"""`ragged_gated_delta_rule`: packed requests over a pool of states."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close

import ejkernel

SLOTS, HEADS, WIDTH, CHANNELS = 6, 2, 4, 3


def tokens(count: int, seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    arrays = {
        "query": rng.standard_normal((count, HEADS, WIDTH)),
        "key": rng.standard_normal((count, HEADS, WIDTH)),
        "value": rng.standard_normal((count, HEADS, CHANNELS)),
        "beta": rng.random((count, HEADS)),
        "decay": -0.3 * rng.random((count, HEADS)),
    }
    return {name: jnp.asarray(value, dtype) for name, value in arrays.items()}


def pool(dtype: Any = jnp.float32) -> Any:
    return jax.random.normal(jax.random.key(0), (SLOTS, HEADS, WIDTH, CHANNELS)).astype(dtype)


def by_request(arrays: dict[str, Any], states: Any, bounds: Any, slots: Any) -> tuple[Any, Any]:
    """Each request by itself."""
    out = np.zeros((*arrays["value"].shape,))
    states = np.array(states, np.float32)
    for start, end, slot in zip(bounds[:-1], bounds[1:], slots, strict=True):
        if start == end:
            continue
        alone = {name: value[None, start:end] for name, value in arrays.items()}
        known = 0 <= slot < len(states)
        initial = jnp.asarray(states[slot : slot + 1]) if known else None
        got, state = ejkernel.gated_delta_rule(**alone, initial_state=initial, return_state=True)
        out[start:end] = got[0]
        if known:
            states[slot] = state[0]
    return out, states


def test_prefill_decode_and_mixes_share_one_program() -> None:
    arrays, states, traces = tokens(24), pool(), []

    @jax.jit
    def step(arrays: Any, states: Any, bounds: Any, slots: Any) -> Any:
        traces.append(1)
        return ejkernel.ragged_gated_delta_rule(
            **arrays, recurrent_state=states, query_start_loc=bounds, state_indices=slots, chunk_size=8
        )

    for bounds, slots in (
        ([0, 1, 2, 3, 4], [4, 1, 0, 5]),
        ([0, 9, 24, 24, 24], [2, 0, 0, 0]),
        ([0, 1, 18, 19, 21], [5, 3, 2, 1]),
        ([0, 1, 1, 4, 5], [3, -1, -1, SLOTS]),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0]),
    ):
        poisoned = {name: value.at[bounds[-1] :].set(jnp.nan) for name, value in arrays.items()}
        out, after = step(poisoned, states, jnp.array(bounds), jnp.array(slots))
        wanted, wanted_after = by_request(arrays, states, bounds, slots)
        assert_close(out, wanted, 5e-6)
        assert_close(after, wanted_after, 5e-6)
        named = {slot for slot, start, end in zip(slots, bounds[:-1], bounds[1:], strict=True) if end > start}
        for slot in {*range(SLOTS)} - named:
            np.testing.assert_array_equal(after[slot], states[slot])
    assert len(traces) == 1


def test_a_donated_pool_is_updated_in_place() -> None:
    states = jax.random.normal(jax.random.key(0), (4096, HEADS, WIDTH, CHANNELS))
    arrays, bounds, slots = tokens(8), jnp.arange(9), jnp.arange(8) * 3

    def step(states: Any) -> Any:
        return ejkernel.ragged_gated_delta_rule(**arrays, recurrent_state=states, query_start_loc=bounds, state_indices=slots)

    memory = jax.jit(step, donate_argnums=0).lower(states).compile().memory_analysis()
    assert memory.alias_size_in_bytes == states.nbytes
    assert memory.temp_size_in_bytes < states.nbytes / 4


def test_decode_equals_the_next_step_of_prefill() -> None:
    """Half of a prompt, then token after token, against the whole prompt at once."""
    arrays, states = tokens(10), jnp.zeros((SLOTS, HEADS, WIDTH, CHANNELS))
    slot = jnp.array([2])
    whole, after = ejkernel.ragged_gated_delta_rule(
        **arrays, recurrent_state=states, query_start_loc=jnp.array([0, 10]), state_indices=slot
    )
    outs = []
    for start, end in ((0, 5), *((i, i + 1) for i in range(5, 10))):
        part = {name: value[start:end] for name, value in arrays.items()}
        out, states = ejkernel.ragged_gated_delta_rule(
            **part, recurrent_state=states, query_start_loc=jnp.array([0, end - start]), state_indices=slot
        )
        outs.append(out)
    assert_close(jnp.concatenate(outs), whole, 5e-6)
    assert_close(states, after, 5e-6)


def test_a_pool_of_two_bytes_keeps_its_type() -> None:
    arrays, states = tokens(9, dtype=jnp.bfloat16), pool(jnp.bfloat16)
    out, after = ejkernel.ragged_gated_delta_rule(
        **arrays, recurrent_state=states, query_start_loc=jnp.array([0, 1, 9]), state_indices=jnp.array([1, 3])
    )
    assert (out.dtype, after.dtype) == (jnp.bfloat16, jnp.bfloat16)
    wanted, wanted_after = by_request(arrays, states, [0, 1, 9], [1, 3])
    assert_close(out, wanted, 5e-3)
    assert_close(after, wanted_after, 5e-3)


def test_gradients_reach_the_pool() -> None:
    arrays, states = tokens(9), pool()
    bounds, slots = [0, 1, 9], [1, 3]

    def loss(arrays: Any, states: Any) -> Any:
        out, after = ejkernel.ragged_gated_delta_rule(
            **arrays, recurrent_state=states, query_start_loc=jnp.array(bounds), state_indices=jnp.array(slots)
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(after))

    def one_by_one(arrays: Any, states: Any) -> Any:
        total = jnp.sum(jnp.sin(states[jnp.array([0, 2, 4, 5])]))
        for start, end, slot in zip(bounds[:-1], bounds[1:], slots, strict=True):
            alone = {name: value[None, start:end] for name, value in arrays.items()}
            out, after = ejkernel.gated_delta_rule(**alone, initial_state=states[slot][None], return_state=True)
            total += jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(after))
        return total

    got, wanted = (jax.jit(jax.grad(f, argnums=(0, 1)))(arrays, states) for f in (loss, one_by_one))
    for leaf, expected in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(leaf, expected, 2e-5)


def test_class_form_and_defaults() -> None:
    arrays = tokens(3)
    arguments = {**arrays, "recurrent_state": pool(), "query_start_loc": jnp.array([0, 3]), "state_indices": jnp.array([0])}
    executor = ejkernel.create_default_executor()
    for got, wanted in zip(
        executor(ejkernel.RaggedGatedDeltaRule(), **arguments), ejkernel.ragged_gated_delta_rule(**arguments), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    no_decay, _ = ejkernel.ragged_gated_delta_rule(**{**arguments, "decay": None})
    assert_close(no_decay, ejkernel.ragged_gated_delta_rule(**{**arguments, "decay": 0 * arrays["decay"]})[0], 2e-7)


def test_slots_and_bounds_of_any_integer_type() -> None:
    """A pool of 300 slots has more than a byte can count."""
    states = jax.random.normal(jax.random.key(1), (300, HEADS, WIDTH, CHANNELS))
    arguments = {**tokens(3), "recurrent_state": states}
    bounds, slots = np.array([0, 1, 3]), np.array([250, 44])
    wanted = ejkernel.ragged_gated_delta_rule(**arguments, query_start_loc=bounds, state_indices=slots)
    assert np.all(np.any(wanted[1] != states, axis=(1, 2, 3)) == np.isin(np.arange(300), slots))
    got = ejkernel.ragged_gated_delta_rule(
        **arguments, query_start_loc=bounds.astype(np.uint8), state_indices=slots.astype(np.uint8)
    )
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query_start_loc": None}, TypeError, "query_start_loc: got NoneType, expected an array"),
        ({"recurrent_state": None}, TypeError, "recurrent_state: got NoneType, expected an array"),
        ({"query_start_loc": jnp.array([0, 2, 1])}, ValueError, "query_start_loc: got .* expected values that do not decrease"),
        ({"query_start_loc": jnp.array([0, 2, 4])}, ValueError, "from 0 to at most 3 = tokens of query"),
        ({"query_start_loc": jnp.array([0, 3])}, ValueError, r"query_start_loc: got shape \(2,\), expected \(3,\)"),
        ({"state_indices": jnp.array([0.0, 1.0])}, TypeError, "state_indices: got dtype float32, expected integers"),
        ({"recurrent_state": pool()[:, :1]}, ValueError, r"recurrent_state: got shape \(6, 1, 4, 3\), expected \(6, 2, 4, 3\)"),
        ({"decay": [0.0]}, TypeError, "^decay: got list, expected an array"),
        ({"softmax_scale": "1"}, TypeError, "^softmax_scale: got '1', expected a number"),
        ({"query": tokens(3)["query"][None]}, ValueError, "query: got shape .* with 4 axes, expected 3 axes"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        **tokens(3),
        "recurrent_state": pool(),
        "query_start_loc": jnp.array([0, 1, 3]),
        "state_indices": jnp.array([0, 1]),
    }
    with pytest.raises(error, match=message):
        ejkernel.ragged_gated_delta_rule(**{**arguments, **change})

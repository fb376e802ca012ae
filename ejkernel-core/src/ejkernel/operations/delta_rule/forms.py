"""Entry points to `delta_rule` beside its own: several steps of a token, a pool of states, and RWKV-7's removal key."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ejkernel.call.partition import entries_of, explicit_mesh_of, is_mapped, map_shards, placed_on
from ejkernel.call.records import Bound
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.packed import check_packed, check_segments
from ejkernel.operations.delta_rule.interface import OPERATION
from ejkernel.utils.checks import check_array, check_compute, check_shape
from ejkernel.utils.dtypes import accumulator
from ejkernel.utils.integers import as_int32


def chunked_by(chunk_size: Any, cfg: Any) -> Any:
    """The config that `chunk_size=` and `cfg=` ask for."""
    if chunk_size is None:
        return cfg
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)):
        raise wrong_type("chunk_size", repr(chunk_size), "an int")
    if chunk_size < 1:
        raise invalid("chunk_size", chunk_size, "a value >= 1")
    if cfg is not None:
        raise invalid("chunk_size", chunk_size, "None beside cfg", remedy="cfg holds it")
    return {"chunk_size": int(chunk_size)}


def delta(*, platform: Any, cfg: Any, form: Any = None, **rest: Any) -> Any:
    """`delta_rule` with the arguments of the public functions in one dictionary, for `over_mesh`."""
    names = ("query", "key", "value", "beta", "decay", "initial_state", "seg_ids", "cu_seqlens")
    arrays = {name: rest.pop(name) for name in names}
    return OPERATION.invoke(arrays, rest, platform=platform, cfg=cfg, form=form)


def product(**arguments: Any) -> Any:
    """`delta` with several steps of each token, for `over_mesh`."""
    return delta(form=_by_steps, **arguments)


def _by_steps(
    *,
    query: Any,
    key: Any,
    value: Any,
    beta: Any,
    decay: Any,
    seg_ids: Any,
    cu_seqlens: Any,
    num_householder: int,
    **rest: Any,
) -> Bound:
    """Canonicalise tokens of several steps as steps: the first decays, the last is read."""
    check_compute("query", query, ndim=4)
    (batch, length), steps = query.shape[:2], num_householder
    for name, array, ndim in (("key", key, 4), ("value", value, 4), ("beta", beta, 3)):
        check_compute(name, array, ndim=ndim)
        if array.shape[:2] != (batch, length * steps):
            expected = f"batch {batch} and {length * steps} = T * num_householder steps, T as in query"
            raise invalid(name, f"shape {tuple(array.shape)}", expected)
    if decay is not None:
        check_compute("decay", decay, ndim=3)
        check_shape("decay", decay, (batch, length, decay.shape[2]), "[B,T,H], one per token and head")

    def at_step(array: Any, index: int) -> Any:
        """`[B,T,...]` as `[B,T*n,...]`, zeros at the other steps."""
        around = ((0, 0), (0, 0), (index, steps - 1 - index), *[(0, 0)] * (array.ndim - 2))
        return jnp.pad(array[:, :, None], around).reshape(batch, length * steps, *array.shape[2:])

    if seg_ids is not None:
        check_segments(seg_ids, batch, length)
    if cu_seqlens is not None:
        check_packed(cu_seqlens, "query", batch)
    bound = OPERATION.canonicalise(
        at_step(query, steps - 1),
        key,
        value,
        beta,
        None if decay is None else at_step(decay, 0),
        seg_ids=None if seg_ids is None else jnp.repeat(as_int32(seg_ids), steps, axis=1),
        cu_seqlens=None if cu_seqlens is None else as_int32(cu_seqlens) * steps,
        **rest,
    )

    def finish(outputs: Any) -> Any:
        out = outputs.out.reshape(batch, length, steps, *outputs.out.shape[2:])[:, :, -1]
        return bound.finish(outputs._replace(out=out))

    return Bound(bound.call, bound.inputs, finish)


def dims_of(decay: Any, cu_seqlens: Any) -> dict[str, str]:
    """The axes of the arrays of `delta`, for `over_mesh`."""
    return {
        **dict.fromkeys(("query", "key"), "b t h d"),
        "value": "b t h v",
        "beta": "b t h",
        "decay": "b t h" if getattr(decay, "ndim", 3) == 3 else "b t h d",
        "initial_state": "b h d v" if cu_seqlens is None else "n h d v",
        "seg_ids": "b t",
        "cu_seqlens": "s",
    }


def check_starts(query_start_loc: Any, query: Any) -> None:
    """Refuse concrete starts that decrease, do not begin with 0 or end beyond the tokens."""
    if isinstance(query_start_loc, jax.core.Tracer) or not hasattr(query_start_loc, "shape") or not hasattr(query, "shape"):
        return
    values = np.asarray(query_start_loc)
    if values.ndim != 1 or values.size == 0 or len(query.shape) != 3:
        return
    if values[0] != 0 or values[-1] > query.shape[0] or (np.diff(values) < 0).any():
        expected = f"values that do not decrease, from 0 to at most {query.shape[0]} = tokens of query"
        raise invalid("query_start_loc", values, expected)


def _put(states: Any, at: Any, new: Any) -> Any:
    """States `[S,H,K,V]` with new ones at these places; those that lie outside are dropped."""

    def put(states: Any, at: Any, new: Any) -> Any:
        return states.at[at].set(new, mode="drop")

    mesh = explicit_mesh_of((states, new))
    if mesh is None:
        return put(states, at, new)
    split: tuple[tuple[str, ...], ...] = ((), entries_of(states)[1], (), ())
    if not is_mapped(mesh):
        return map_shards(put, mesh, (states, at, new), (split, ((),), split), split)
    # JAX differentiates a scatter by gathers that it cannot shard under a vmap.
    place = jnp.arange(states.shape[0], dtype=jnp.int32)

    def one(states: Any, given: tuple[Any, Any]) -> tuple[Any, None]:
        return jnp.where((place == given[0])[:, None, None, None], given[1][None], states), None

    return jax.lax.scan(one, placed_on(mesh, states, split), (at, placed_on(mesh, new, split)))[0]


def ragged(
    *,
    query: Any,
    key: Any,
    value: Any,
    beta: Any,
    decay: Any,
    recurrent_state: Any,
    query_start_loc: Any,
    state_indices: Any,
    **options: Any,
) -> Bound:
    """Canonicalise packed tokens `[N, H, ...]` whose states stand in the slots of a pool `[slots, H, D, V]`."""
    tokens = {"query": query, "key": key, "value": value, "beta": beta, "decay": decay}
    for name, array in tokens.items():
        if array is not None or name in ("query", "key", "value"):
            check_array(name, array, ndim=3 if name in ("query", "key", "value") else None)
    check_compute("recurrent_state", recurrent_state, ndim=4)
    for name, array in (("query_start_loc", query_start_loc), ("state_indices", state_indices)):
        check_array(name, array, ndim=1, floating=False)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise wrong_type(name, f"dtype {array.dtype}", "integers")
    check_shape("query_start_loc", query_start_loc, (state_indices.shape[0] + 1,), "[requests of state_indices + 1]")
    heads = max(query.shape[1], key.shape[1], value.shape[1])
    slots = recurrent_state.shape[0]
    # The number of slots may not fit into a smaller type.
    state_indices, query_start_loc = as_int32(state_indices), as_int32(query_start_loc)
    shape = (slots, heads, query.shape[2], value.shape[2])
    check_shape("recurrent_state", recurrent_state, shape, "[slots, heads, channels of query, channels of value]")

    known = (state_indices >= 0) & (state_indices < slots)
    safe = jnp.where(known, state_indices, 0)
    initial = recurrent_state[safe] if slots else jnp.zeros((state_indices.shape[0], *shape[1:]), recurrent_state.dtype)
    initial = jnp.where(known[:, None, None, None], initial, 0)
    batched = {name: None if array is None else jnp.expand_dims(array, 0) for name, array in tokens.items()}
    bound = OPERATION.canonicalise(**batched, initial_state=initial, cu_seqlens=query_start_loc, return_state=True, **options)
    lengths = jnp.minimum(query_start_loc[1:], query.shape[0]) - query_start_loc[:-1]
    stored_at = jnp.where(known & (lengths > 0), state_indices, slots)

    def finish(outputs: Any) -> Any:
        out, final = bound.finish(outputs)
        return out[0], _put(recurrent_state, stored_at, final.astype(recurrent_state.dtype))

    return Bound(bound.call, bound.inputs, finish)


def by_vectors(*, query: Any, decay: Any, key: Any, value: Any, a: Any, b: Any, **rest: Any) -> Bound:
    """Canonicalise RWKV-7, whose a and b are not optional."""
    arrays = {"query": query, "decay": decay, "key": key, "value": value, "a": a, "b": b}
    for name, array in arrays.items():
        check_array(name, array, ndim=4)
    return OPERATION.canonicalise(**arrays, **rest)


def by_removal(*, query: Any, decay: Any, key: Any, value: Any, kk: Any, a: Any, **rest: Any) -> Bound:
    """Canonicalise RWKV-7 with `a = kk * a` and `b = -kk`; the product is not rounded to a type of two bytes."""
    arrays = {"query": query, "decay": decay, "key": key, "value": value}
    for name, array in {**arrays, "kk": kk, "a": a}.items():
        check_compute(name, array, ndim=4)
    check_shape("a", a, tuple(kk.shape), "[B,T,H,D] as kk")
    bounds = rest.get("cu_seqlens")
    if bounds is not None and getattr(bounds, "ndim", 0) == 1 and bounds.shape[0]:
        # What stands after the last sequence may be NaN, and 0 * NaN would be in the gradient of this product.
        used = (jnp.arange(kk.shape[1]) < bounds[-1])[:, None, None]
        kk, a = jnp.where(used, kk, 0), jnp.where(used, a, 0)
    wide = accumulator(kk.dtype)
    write = kk.astype(wide) * a.astype(wide)
    return OPERATION.canonicalise(**arrays, a=write, b=-kk, **rest)

"""The forward phase: tiles of queries, sorted by how many keys they see, walk over their pages in groups with a running maximum
and sum (Kwon et al., PagedAttention, 2023; Dao et al., FlashAttention, 2022)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.paged_attention.interface import PagedAttentionCall, PagedAttentionInputs, PagedAttentionOutputs
from ejkernel_xla._batch import over_batch
from ejkernel_xla.paged_attention.config import PagedAttentionConfig
from ejkernel_xla.paged_attention.tiles import Attention, Sizes, Tiles, steps_of, tile_list


class _State(NamedTuple):
    """Running maximum and sum of `exp(logit - maximum)` `[t,k,g,q]`, weighted values `[t,k,g,q,e]`."""

    maximum: Any
    total: Any
    values: Any


def forward(call: PagedAttentionCall, inputs: PagedAttentionInputs, config: PagedAttentionConfig) -> PagedAttentionOutputs:
    batch, tokens, heads, _ = call.query.shape
    if batch * tokens * call.kv_lens.shape[1] * call.value_size == 0:
        out = jnp.zeros((batch, tokens, heads, call.value_size), call.query.dtype)
        lse = jnp.full((batch, tokens, heads), -jnp.inf, jnp.float32)
    else:
        out, lse = over_batch(functools.partial(_sweep, call, config), inputs.query.shape[0], inputs)
    return PagedAttentionOutputs(out, lse if call.return_lse or call.save_residuals else None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _sweep(call: PagedAttentionCall, config: PagedAttentionConfig, member: PagedAttentionInputs) -> tuple[Any, Any]:
    """out `[n,h,e]` and lse `[n,h]` of one batch member, with as many steps as its lengths ask for."""
    return _attend(call, config, member, bounded=False)


@_sweep.defjvp  # pyright: ignore[reportUntypedFunctionDecorator]
def _differentiated(call: Any, config: Any, primals: Any, tangents: Any) -> Any:
    """A loop whose length is data cannot be differentiated backwards, so JAX's own derivatives are those of a bounded one."""
    return jax.jvp(functools.partial(_attend, call, config, bounded=True), primals, tangents)


def _attend(
    call: PagedAttentionCall, config: PagedAttentionConfig, member: PagedAttentionInputs, *, bounded: bool
) -> tuple[Any, Any]:
    sizes = Sizes.of(call, config)
    attention = Attention(call, sizes, member)
    tiles, rows = tile_list(call, sizes, member)
    groups = sizes.tiles // sizes.together
    run = functools.partial(_group, attention, bounded)
    if groups == 1:
        out, lse = run(tiles)
    else:
        order = jnp.argsort(-steps_of(tiles, sizes))
        tiles = Tiles(*(field[order].reshape(groups, sizes.together) for field in tiles))
        out, lse = (x.reshape(-1, *x.shape[2:]) for x in jax.lax.map(run, tiles))
        rows = rows._replace(tile=jnp.argsort(order)[rows.tile])
    return attention.put(out, rows), attention.put(lse, rows, -jnp.inf)


def _group(attention: Attention, bounded: bool, tiles: Tiles) -> tuple[Any, Any]:
    """out `[t,k,g,q,e]` and lse `[t,k,g,q]` of tiles that walk together."""
    call, sizes, member = attention.call, attention.sizes, attention.member
    shape = (sizes.together, call.heads, attention.groups, sizes.block_q)
    state = _State(
        jnp.full(shape, -jnp.inf, attention.wide),
        jnp.zeros(shape, attention.wide),
        jnp.zeros((*shape, call.value_size), attention.wide),
    )
    state = vary_like(state, member)
    if attention.readable:
        step = functools.partial(_online_softmax_update, attention, tiles, attention.take(member.query, tiles))
        if bounded:
            steps = jnp.arange(-(-call.longest // sizes.block_k), dtype=jnp.int32)
            state = jax.lax.scan(lambda state, index: (step(index, state), None), state, steps)[0]
        else:
            state = jax.lax.fori_loop(0, jnp.max(steps_of(tiles, sizes)), step, state)
    return _finish(attention, _with_sinks(attention, state))


def _online_softmax_update(attention: Attention, tiles: Tiles, query: Any, index: Any, state: _State) -> _State:
    scores = attention.scores(tiles, query, attention.block(tiles, index))
    logits = jnp.where(scores.visible, scores.logits, -jnp.inf)
    maximum = jnp.maximum(state.maximum, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
    rescale, finite = _rescale(state.maximum, maximum)
    weights = jnp.exp(logits - finite[..., None])
    rows = weights if scores.value_factor is None else weights * scores.value_factor
    rows = rows.astype(attention.dtype).reshape(*weights.shape[:2], -1, weights.shape[4])
    values = attention.dot("tkms,tkse->tkme", rows, scores.value).reshape(state.values.shape)
    return _State(maximum, state.total * rescale + jnp.sum(weights, axis=-1), state.values * rescale[..., None] + values)


def _rescale(before: Any, after: Any) -> tuple[Any, Any]:
    """The factor of what was summed under the maximum before, and the maximum after, 0 where nothing is visible yet."""
    finite = jnp.where(after == -jnp.inf, 0, after)
    return jnp.exp(before - finite), finite


def _with_sinks(attention: Attention, state: _State) -> _State:
    sinks = attention.member.softmax_aux
    if sinks is None:
        return state
    sinks = sinks.astype(attention.wide).reshape(1, attention.call.heads, attention.groups, 1, -1)
    maximum = jnp.maximum(state.maximum, jax.lax.stop_gradient(jnp.max(sinks, axis=-1)))
    rescale, finite = _rescale(state.maximum, maximum)
    total = state.total * rescale + jnp.sum(jnp.exp(sinks - finite[..., None]), axis=-1)
    return _State(maximum, total, state.values * rescale[..., None])


def _finish(attention: Attention, state: _State) -> tuple[Any, Any]:
    empty = state.total == 0
    total = jnp.where(empty, 1, state.total)
    out = state.values / total[..., None]
    if attention.value_scale is not None:
        out = out * attention.value_scale[None, :, None, None, None]
    lse = jnp.where(empty, -jnp.inf, jnp.where(empty, 0, state.maximum) + jnp.log(total))
    return out.astype(attention.call.query.dtype), lse.astype(jnp.float32)

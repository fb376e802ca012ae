"""The backward phase: recomputes weights from the log-sum-exp, one tile after the other, and accumulates gradients of keys and
values in their pages in that order, so results are deterministic."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call import has_gradient, vary_like
from ejkernel.operations.common.pages import FUSED, alternating
from ejkernel.operations.paged_attention.interface import PagedAttentionCall, PagedAttentionInputs, PagedAttentionOutputs
from ejkernel_xla._batch import over_batch
from ejkernel_xla.paged_attention.config import PagedAttentionConfig
from ejkernel_xla.paged_attention.tiles import Attention, Block, Sizes, Tiles, steps_of, tile_list


class _Sums(NamedTuple):
    """Gradients that grow over tiles: key `[p,s,k,d]`, value `[p,s,k,e]`, key_scale and value_scale `[k]`, key_token_scale and
    value_token_scale `[p,s,k]`, alibi_slopes `[k,g]`, qq_bias; None where there is nothing to add to."""

    key: Any
    value: Any
    key_scale: Any
    value_scale: Any
    key_token_scale: Any
    value_token_scale: Any
    alibi_slopes: Any
    qq_bias: Any


class _Fixed(NamedTuple):
    """What a tile brings along: query, d_out, lse and mean, the weighted mean of the gradients by the weights less that of the
    lse; `[t,k,g,q,...]`."""

    query: Any
    d_out: Any
    lse: Any
    mean: Any


def backward(
    call: PagedAttentionCall,
    inputs: PagedAttentionInputs,
    outputs: PagedAttentionOutputs,
    cotangents: PagedAttentionOutputs,
    config: PagedAttentionConfig,
) -> PagedAttentionInputs:
    moving = [name for name in _MOVING if (array := getattr(inputs, name)) is not None and has_gradient(array)]
    if call.query.size * call.kv_lens.shape[1] * call.value_size == 0:
        found = {name: jnp.zeros_like(getattr(inputs, name)) for name in moving}
    else:
        given = (outputs.out, outputs.lse, cotangents.out, cotangents.lse)
        gradients = over_batch(functools.partial(_gradients, call, config), inputs.query.shape[0], inputs, *given)
        found = {name: _as_input(gradients[name], getattr(inputs, name)) for name in moving}
    return PagedAttentionInputs(**{**dict.fromkeys(PagedAttentionInputs._fields), **found})


_MOVING = (
    "query",
    "key_pages",
    "value_pages",
    "softmax_aux",
    "alibi_slopes",
    "qq_bias",
    "key_scale",
    "value_scale",
    "key_token_scale",
    "value_token_scale",
)


def _as_input(gradient: Any, array: Any) -> Any:
    """Summed over the batch where it shares the input, and in the input's dtype."""
    if array.shape[0] != gradient.shape[0]:
        gradient = jnp.sum(gradient, axis=0, keepdims=True)
    return gradient.reshape(array.shape).astype(array.dtype)


def _gradients(
    call: PagedAttentionCall,
    config: PagedAttentionConfig,
    member: PagedAttentionInputs,
    out: Any,
    lse: Any,
    d_out: Any,
    d_lse: Any,
) -> dict[str, Any]:
    """Gradients of one batch member, in wide dtypes."""
    sizes = Sizes.of(call, PagedAttentionConfig(config.block_q, config.block_k, 1))
    attention = Attention(call, sizes, member)
    wide = attention.wide
    tiles, rows = tile_list(call, sizes, member)
    d_out = jnp.zeros_like(out) if d_out is None else d_out
    d_lse = jnp.zeros_like(lse) if d_lse is None else jnp.where(lse == -jnp.inf, 0, d_lse).astype(wide)
    mean = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    # Large factors amplify the rounding of `out` in a row's gradient sums; recompute the mean for them.
    anew = any(factor is not None for factor in (member.key_scale, member.key_token_scale, member.alibi_slopes))

    def one(sums: _Sums, tile: Tiles) -> tuple[_Sums, Any]:
        arrays = (member.query, d_out, lse, -d_lse if anew else mean)
        fixed = _Fixed(*(attention.take(array, tile) for array in arrays))
        zeros = vary_like(jnp.zeros(fixed.query.shape, wide), (member, d_out))
        if not attention.readable:
            return sums, zeros[0]
        count = steps_of(tile, sizes)[0]
        if anew:
            average = functools.partial(_average, attention, tile, fixed)
            fixed = fixed._replace(mean=jax.lax.fori_loop(0, count, average, vary_like(fixed.mean, (member, d_out))))
        step = functools.partial(_accumulate, attention, tile, fixed)
        sums, d_query = jax.lax.fori_loop(0, count, step, (sums, zeros))
        return sums, d_query[0]

    sums = vary_like(_no_sums(attention), (member, d_out))
    sums, d_query = jax.lax.scan(one, sums, Tiles(*(field[:, None] for field in tiles)))
    found: dict[str, Any] = {"query": attention.put(d_query, rows), **_by_input(call, member, sums)}
    if member.softmax_aux is not None:
        weights = jnp.exp(member.softmax_aux.astype(wide)[None] - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])
        found["softmax_aux"] = -jnp.sum(jnp.where(rows.owned[:, None, None], weights * mean[..., None], 0), axis=0)
    return found


def _no_sums(attention: Attention) -> _Sums:
    call, member, wide = attention.call, attention.member, attention.wide
    pages = (call.pages.pages, call.pages.page_size, call.heads)
    stored = has_gradient(member.key_pages)

    def zeros(shape: tuple[int, ...], wanted: Any) -> Any:
        return jnp.zeros(shape, wide) if wanted else None

    return _Sums(
        zeros((*pages, call.query.shape[3]), stored),
        zeros((*pages, call.value_size), stored),
        zeros((call.heads,), member.key_scale is not None),
        zeros((call.heads,), member.value_scale is not None),
        zeros(pages, member.key_token_scale is not None),
        zeros(pages, member.value_token_scale is not None),
        zeros((call.heads, attention.groups), member.alibi_slopes is not None),
        None if member.qq_bias is None else jnp.zeros(member.qq_bias.shape, wide),
    )


def _weighed(attention: Attention, tile: Tiles, fixed: _Fixed, block: Block) -> tuple[Any, Any, Any, Any]:
    """Scores, weights, products of d_out with the values, and the values' scales as a factor on them."""
    scores = attention.scores(tile, fixed.query, block)
    lse = jnp.where(fixed.lse == -jnp.inf, 0, fixed.lse)[..., None]
    weights = jnp.exp(jnp.where(scores.visible, scores.logits, -jnp.inf) - lse)
    products = attention.dot("tkgqe,tkse->tkgqs", fixed.d_out.astype(attention.dtype), scores.value)
    return scores, weights, products, _times(_of_heads(attention.value_scale), scores.value_factor, 1)


def _average(attention: Attention, tile: Tiles, fixed: _Fixed, index: Any, mean: Any) -> Any:
    scores, weights, products, value_scale = _weighed(attention, tile, fixed, attention.block(tile, index))
    return mean + jnp.sum(jnp.where(scores.visible, weights * value_scale * products, 0), axis=-1)


def _accumulate(attention: Attention, tile: Tiles, fixed: _Fixed, index: Any, state: tuple[_Sums, Any]) -> tuple[_Sums, Any]:
    sums, d_query = state
    call, dtype = attention.call, attention.dtype
    block = attention.block(tile, index)
    scores, weights, products, value_scale = _weighed(attention, tile, fixed, block)
    d_logits = weights * (value_scale * products - fixed.mean[..., None])
    d_raw = d_logits if scores.slope is None else d_logits * scores.slope
    d_raw = jnp.where(scores.visible, d_raw, 0)
    d_scaled = d_raw * call.softmax_scale
    key_scale = _of_heads(attention.key_scale)
    d_scaled = (d_scaled * _times(key_scale, scores.key_factor, 1)).astype(dtype)
    d_query = d_query + attention.dot("tkgqs,tksd->tkgqd", d_scaled, scores.key)
    d_key = attention.dot("tkgqs,tkgqd->skd", d_scaled, fixed.query.astype(dtype))
    d_value = attention.dot("tkgqs,tkgqe->ske", (weights * value_scale).astype(dtype), fixed.d_out.astype(dtype))
    d_key_scale = jnp.where(scores.visible, d_raw * scores.raw, 0)
    d_value_scale, value_head_scale = jnp.where(scores.visible, weights * products, 0), _of_heads(attention.value_scale)
    sums = _Sums(
        _add_to_pages(sums.key, block, lambda: d_key),
        _add_to_pages(sums.value, block, lambda: d_value),
        _plus(sums.key_scale, lambda: call.softmax_scale * jnp.sum(d_key_scale * _times(scores.key_factor, 1), (0, 2, 3, 4))),
        _plus(sums.value_scale, lambda: jnp.sum(d_value_scale * _times(scores.value_factor, 1), (0, 2, 3, 4))),
        _add_to_pages(
            sums.key_token_scale, block, lambda: call.softmax_scale * jnp.sum(d_key_scale * _times(key_scale, 1), (0, 2, 3)).T
        ),
        _add_to_pages(sums.value_token_scale, block, lambda: jnp.sum(d_value_scale * _times(value_head_scale, 1), (0, 2, 3)).T),
        _plus(sums.alibi_slopes, lambda: jnp.sum(d_logits * attention.distance(tile, block), (0, 3, 4))),
        sums.qq_bias if sums.qq_bias is None else sums.qq_bias.at[scores.bias_at].add(jnp.sum(d_logits, (1, 2)), mode="drop"),
    )
    return sums, d_query


def _of_heads(scale: Any) -> Any:
    """`[k]` as a factor of `[t,k,g,q,s]`."""
    return None if scale is None else scale[None, :, None, None, None]


def _times(*factors: Any) -> Any:
    """The product of those that are there."""
    return functools.reduce(operator.mul, [factor for factor in factors if factor is not None])


def _plus(total: Any, part: Any) -> Any:
    return None if total is None else total + part()


def _add_to_pages(total: Any, block: Block, part: Any) -> Any:
    """Add what `part()` gives, `[s,k,d]` or `[s,k]`, at the keys of a block of one tile."""
    if total is None:
        return None
    page = jnp.where(block.exists[0], block.page[0], total.shape[0])
    return total.at[page, block.offset[0]].add(part(), mode="drop")


def _by_input(call: PagedAttentionCall, member: PagedAttentionInputs, sums: _Sums) -> dict[str, Any]:
    found: dict[str, Any] = {"qq_bias": sums.qq_bias}
    if sums.alibi_slopes is not None:
        found["alibi_slopes"] = sums.alibi_slopes.reshape(-1)
    for name, scale in (("key_scale", member.key_scale), ("value_scale", member.value_scale)):
        if scale is not None:
            total = getattr(sums, name)
            found[name] = jnp.sum(total, keepdims=True) if scale.shape == (1,) else total
    for name, scale in (("key_token_scale", member.key_token_scale), ("value_token_scale", member.value_token_scale)):
        if scale is not None:
            total = getattr(sums, name)
            found[name] = jnp.sum(total, axis=2, keepdims=True) if scale.shape[2] == 1 else total
    if sums.key is None:
        return found
    if call.layout in FUSED:
        both = jnp.stack([sums.key, sums.value], axis=3).reshape(*sums.key.shape[:2], 2 * sums.key.shape[2], sums.key.shape[3])
        whole = jax.eval_shape(lambda pages: alternating(pages, call.layout), member.key_pages).shape
        room = [(0, size - part) for size, part in zip(whole, both.shape, strict=True)]
        return {**found, "key_pages": jnp.pad(both, room).reshape(member.key_pages.shape)}
    order = {"pthd": (0, 1, 2, 3), "phtd": (0, 2, 1, 3), "hptd": (2, 0, 1, 3)}[call.layout]
    return {**found, "key_pages": sums.key.transpose(order), "value_pages": sums.value.transpose(order)}

"""The launches of the backward phase, and the work that XLA does before and after."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton.language as tl

from ejkernel.call import has_gradient
from ejkernel.operations.common.pages import FUSED, alternating
from ejkernel.operations.paged_attention.interface import (
    OPERATION,
    PagedAttentionCall,
    PagedAttentionInputs,
    PagedAttentionOutputs,
)
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._pages import search_block, storage, with_common_batch
from ejkernel_triton.paged_attention.backward import bias_gradient_kernel, key_gradient_kernel, query_gradient_kernel
from ejkernel_triton.paged_attention.config import BackwardConfig, heads_of_tile, product_dtype, rows_of_tile
from ejkernel_triton.paged_attention.params import PagedAttentionParams, params_of

TRITON_DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
_BIAS_BLOCK = 16
"""Queries and keys of a tile of the gradient of the bias."""
_DIFFERENTIABLE = tuple(name for name in OPERATION.differentiable if not name.endswith("token_scale"))
"""Calls with scales of stored rows are refused."""


class _Shared(NamedTuple):
    """What all kernels read: inputs, which are absent or there; the cotangent of out, the log-sum-exp, and the weighted mean of the
    gradients by the weights less that of the log-sum-exp, `[b, N, H]`."""

    inputs: PagedAttentionInputs
    grad: Any
    lse: Any
    mean: Any
    params: PagedAttentionParams
    dtype: Any

    def pages(self) -> tuple[Any, ...]:
        query, key, value = self.inputs[:3]
        return query, key, key if value is None else value

    def options(self) -> tuple[Any, ...]:
        names = ("alibi_slopes", "qq_bias", "key_scale", "value_scale")
        found = (getattr(self.inputs, name) for name in names)
        return (*(self.inputs.query if array is None else array for array in found), self.grad, self.lse, self.mean)


def backward(
    call: PagedAttentionCall,
    inputs: PagedAttentionInputs,
    outputs: PagedAttentionOutputs,
    cotangents: PagedAttentionOutputs,
    config: BackwardConfig,
) -> PagedAttentionInputs:
    moving = [name for name in _DIFFERENTIABLE if (array := getattr(inputs, name)) is not None and has_gradient(array)]
    if call.query.size * call.kv_lens.shape[1] * call.value_size == 0:
        found = {name: jnp.zeros_like(getattr(inputs, name)) for name in moving}
    else:
        gradients = _gradients(call, inputs, outputs, cotangents, config)
        found = {name: as_input(gradients[name], getattr(inputs, name)) for name in moving}
    return PagedAttentionInputs(**{**dict.fromkeys(PagedAttentionInputs._fields), **found})


def as_input(gradient: Any, array: Any) -> Any:
    """Summed over the batch where it shares the input, and in the input's dtype."""
    if array.shape[0] != gradient.shape[0]:
        gradient = jnp.sum(gradient.astype(jnp.float32), axis=0, keepdims=True)
    return gradient.reshape(array.shape).astype(array.dtype)


def _gradients(
    call: PagedAttentionCall,
    inputs: PagedAttentionInputs,
    outputs: PagedAttentionOutputs,
    cotangents: PagedAttentionOutputs,
    config: BackwardConfig,
) -> dict[str, Any]:
    """Of every batch member."""
    out, lse = outputs
    grad = jnp.zeros_like(out) if cotangents.out is None else cotangents.out
    own = jnp.zeros_like(lse) if cotangents.lse is None else jnp.where(lse == -jnp.inf, 0, cotangents.lse)
    # Large factors amplify the rounding of `out` in a row's gradient sums; the mean is formed anew for them.
    anew = inputs.key_scale is not None or inputs.alibi_slopes is not None
    mean = -own if anew else jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - own
    inputs = with_common_batch(inputs)
    dtype = product_dtype(call)
    params = params_of(call, inputs, schedules=storage(inputs.kv_lens), dtype=dtype)
    shared = _Shared(inputs, grad, lse, mean, params, TRITON_DTYPES[dtype.name])
    rows = owned(inputs, call.query.shape[1])
    found: dict[str, Any] = {}
    if call.longest * call.pages.pages == 0:
        found = _nothing(call, inputs)
    else:
        found, mean = _query_gradients(call, shared, config, rows, anew=anew)
        shared = shared._replace(mean=mean)
        if has_gradient(inputs.key_pages):
            found |= _page_gradients(call, shared, config)
        if inputs.qq_bias is not None:
            found["qq_bias"] = _bias_gradient(call, shared)
    if inputs.softmax_aux is not None:
        shift = jnp.where(lse == -jnp.inf, jnp.inf, lse)
        weights = jnp.exp(inputs.softmax_aux.astype(jnp.float32)[:, None] - shift[..., None])  # [b, N, H, n]
        found["softmax_aux"] = -jnp.sum(jnp.where(rows[..., None, None], weights * mean[..., None], 0), axis=1)
    return found


def _nothing(call: PagedAttentionCall, inputs: PagedAttentionInputs) -> dict[str, Any]:
    """Without keys."""
    return {
        name: jnp.zeros(array.shape, jnp.float32) for name in _DIFFERENTIABLE if (array := getattr(inputs, name)) is not None
    }


def owned(inputs: Any, tokens: int) -> Any:
    """Whether a token belongs to a request, `[1|b, N]`."""
    starts = jnp.maximum(inputs.query_start_loc, 0)
    token = jnp.arange(tokens)[None]
    return (token >= starts[:, :1]) & (token < jnp.max(starts, axis=1, keepdims=True))


def _query_gradients(
    call: PagedAttentionCall, shared: _Shared, config: BackwardConfig, rows: Any, *, anew: bool
) -> tuple[dict[str, Any], Any]:
    """Gradients of queries, and of what is summed over rows: scales and slopes. And the mean."""
    batch, tokens, heads, size = call.query.shape
    requests, together = call.kv_lens.shape[1], heads_of_tile(call)
    inputs, params = shared.inputs, shared.params
    head_tiles = call.heads * -(-(heads // call.heads) // together)
    busy = min(requests, tokens)
    tiles = (tokens - busy) // config.query_block_q + busy
    up_to = jnp.cumsum(-(-new_tokens(inputs, tokens) // config.query_block_q), axis=1, dtype=jnp.int32)
    scalars = {"mean": anew, "key_scale": params.key_scales, "value_scale": params.value_scales, "alibi_slopes": params.slopes}
    d_query, *sums = call_kernel(
        query_gradient_kernel,
        (
            *shared.pages(),
            inputs.query_start_loc,
            inputs.kv_lens,
            inputs.block_tables,
            up_to,
            *shared.options(),
            tokens,
            requests,
            call.block_tables.shape[2],
            call.pages.pages,
            tiles,
        ),
        (
            (call.query.shape, call.query.dtype),
            *(((batch, tokens, heads) if wanted else (1,), jnp.float32) for wanted in scalars.values()),
        ),
        grid=batch * tiles * head_tiles,
        num_warps=config.query_num_warps,
        num_stages=config.query_num_stages,
        P=params,
        ANEW=anew,
        BLOCK_D=dot_block(size),
        BLOCK_V=dot_block(call.value_size),
        BLOCK_M=rows_of_tile(call, config.query_block_q),
        BLOCK_K=config.query_block_k,
        HEADS_OF_TILE=together,
        HEAD_TILES=head_tiles,
        TOKENS=config.query_block_q,
        DTYPE=shared.dtype,
        SEARCH=search_block(requests),
        STAGES=config.query_num_stages,
    )
    kept = {name: array for (name, wanted), array in zip(scalars.items(), sums, strict=True) if wanted}
    kept = {name: jnp.where(rows[..., None], array, 0) for name, array in kept.items()}
    mean = kept.pop("mean", shared.mean)
    found: dict[str, Any] = {"query": jnp.where(rows[..., None, None], d_query, 0)}
    for name, array in kept.items():
        by_head = jnp.sum(array, axis=1)  # [b, H]
        if name != "alibi_slopes":
            by_head = jnp.sum(by_head.reshape(batch, call.heads, -1), axis=2)
            if getattr(inputs, name).shape[1] == 1:
                by_head = jnp.sum(by_head, axis=1, keepdims=True)
        found[name] = by_head
    return found, mean


def new_tokens(inputs: Any, tokens: int) -> Any:
    """Of each request, `[1|b, R]`."""
    bounds = jnp.clip(inputs.query_start_loc, 0, tokens)
    return jnp.maximum(bounds[:, 1:] - bounds[:, :-1], 0)


def entries_by_page(inputs: Any, tokens: int, pages: int, size: int) -> tuple[Any, Any]:
    """Entries of block tables in the order of the pages that they name, `[1|b, R W]`, and how many name a page before each,
    `[1|b, pages + 1]`. Entries that no new token sees come last."""
    width = inputs.block_tables.shape[2]
    used = jnp.arange(width)[None, None] * size < jnp.where(new_tokens(inputs, tokens) > 0, inputs.kv_lens, 0)[..., None]
    page = jnp.where(used & (inputs.block_tables >= 0), jnp.minimum(inputs.block_tables, pages), pages)
    page = page.reshape(page.shape[0], -1)
    order = jnp.argsort(page, axis=1, stable=True).astype(jnp.int32)
    ranked = jnp.take_along_axis(page, order, axis=1)
    bounds = jnp.arange(pages + 1, dtype=ranked.dtype)
    return order, jax.vmap(lambda row: jnp.searchsorted(row, bounds).astype(jnp.int32))(ranked)


def _page_gradients(call: PagedAttentionCall, shared: _Shared, config: BackwardConfig) -> dict[str, Any]:
    batch, tokens, _, size = call.query.shape
    inputs, pages, page_size = shared.inputs, call.pages.pages, call.pages.page_size
    entries, up_to = entries_by_page(inputs, tokens, pages, page_size)
    key, value = inputs.key_pages, inputs.key_pages if inputs.value_pages is None else inputs.value_pages
    keys = min(config.key_block_k, dot_block(page_size))
    d_key, d_value = call_kernel(
        key_gradient_kernel,
        (
            *shared.pages(),
            inputs.query_start_loc,
            inputs.kv_lens,
            entries,
            up_to,
            *shared.options(),
            tokens,
            call.kv_lens.shape[1],
            call.block_tables.shape[2],
            pages,
        ),
        tuple(
            ((batch, pages, page_size, call.heads, width), array.dtype if array.shape[0] == batch else jnp.float32)
            for array, width in ((key, size), (value, call.value_size))
        ),
        grid=batch * pages * -(-page_size // keys) * call.heads,
        num_warps=config.key_num_warps,
        num_stages=config.key_num_stages,
        P=shared.params,
        ENTRIES=entries.shape[1] if entries.shape[0] > 1 else 0,
        BLOCK_D=dot_block(size),
        BLOCK_V=dot_block(call.value_size),
        BLOCK_M=rows_of_tile(call, config.key_block_q),
        BLOCK_K=keys,
        HEADS_OF_TILE=heads_of_tile(call),
        TOKENS=config.key_block_q,
        DTYPE=shared.dtype,
        STAGES=config.key_num_stages,
    )
    if call.layout in FUSED:
        both = jnp.stack([d_key, d_value], axis=4)  # k0, v0, k1, v1, ...
        both = both.reshape(batch, pages, page_size, 2 * call.heads, size)
        whole = jax.eval_shape(lambda pages: alternating(pages, call.layout), inputs.key_pages).shape
        room = [(0, 0), *((0, size - part) for size, part in zip(whole[1:], both.shape[1:], strict=True))]
        return {"key_pages": jnp.pad(both, room).reshape(batch, *inputs.key_pages.shape[1:])}
    order = {"pthd": (0, 1, 2, 3, 4), "phtd": (0, 1, 3, 2, 4), "hptd": (0, 3, 1, 2, 4)}[call.layout]
    return {"key_pages": d_key.transpose(order), "value_pages": d_value.transpose(order)}


def _bias_gradient(call: PagedAttentionCall, shared: _Shared) -> Any:
    batch, tokens, _, size = call.query.shape
    requests, width = call.kv_lens.shape[1], shared.inputs.qq_bias.shape[3]
    if width == 0:
        return jnp.zeros((batch, *shared.inputs.qq_bias.shape[1:]), jnp.float32)
    (found,) = call_kernel(
        bias_gradient_kernel,
        (
            *shared.pages(),
            shared.inputs.query_start_loc,
            shared.inputs.kv_lens,
            shared.inputs.block_tables,
            *shared.options(),
            tokens,
            requests,
            call.block_tables.shape[2],
            call.pages.pages,
        ),
        (((batch, requests, width, width), jnp.float32),),
        grid=batch * requests * (-(-width // _BIAS_BLOCK)) ** 2,
        num_warps=4,
        P=shared.params,
        BLOCK_D=dot_block(size),
        BLOCK_V=dot_block(call.value_size),
        BLOCK_M=_BIAS_BLOCK,
        BLOCK_K=_BIAS_BLOCK,
        DTYPE=shared.dtype,
    )
    return found if shared.inputs.qq_bias.shape[1] == requests else jnp.sum(found, axis=1, keepdims=True)

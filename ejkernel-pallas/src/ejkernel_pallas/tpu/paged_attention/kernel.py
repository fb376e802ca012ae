"""Paged attention on TPU: one kernel for any mix of prefill, chunked prefill and decode.

Queries, pages and results stay in HBM; the kernel issues the DMAs of each item (`program`). See Jiang et al., Ragged Paged
Attention, 2025, for the idea of one kernel for all mixes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.operations.paged_attention.interface import (
    OPERATION,
    PagedAttentionCall,
    PagedAttentionInputs,
    PagedAttentionOutputs,
)
from ejkernel_pallas._call import compiler_params, cost_estimate, result_like
from ejkernel_pallas.tpu._integers import quotient, remainder
from ejkernel_pallas.tpu._pages import sources
from ejkernel_pallas.tpu._vmem import LANES
from ejkernel_pallas.tpu.paged_attention.config import Config, Shape, product_dtype, vmem_bytes
from ejkernel_pallas.tpu.paged_attention.program import LOG2E, MASKED, NONFINITE, Blocks, Program, Scratch
from ejkernel_pallas.tpu.paged_attention.schedule import Items, Requests, make_items, make_requests, owned
from ejkernel_pallas.tpu.paged_attention.work import Params, Scalars

NAME = "ejkernel_paged_attention"


def forward(call: PagedAttentionCall, inputs: PagedAttentionInputs, config: Config) -> PagedAttentionOutputs:
    query = inputs.query
    batch, tokens = query.shape[:2]
    wants_lse = call.return_lse or call.save_residuals
    out = jnp.zeros((*query.shape[:3], call.value_size), query.dtype)
    if out.size * call.kv_lens.shape[1] == 0:
        # Nothing to compute. The barrier shows in the program that this platform served the call.
        out, lse = jax.lax.optimization_barrier((out, jnp.full(query.shape[:3], -jnp.inf, jnp.float32)))
        return PagedAttentionOutputs(out, lse if wants_lse else None)
    missing = max(config.block_q - tokens, 0)
    if missing:
        query, out = (jnp.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))) for array in (query, out))
    starts, lengths = (_for_all(array, batch) for array in (inputs.query_start_loc, inputs.kv_lens))
    items, count = make_items(call, starts, query.shape[1], config.block_q)
    params = _params(call, config)
    out, *rest = _launch(
        params,
        Scalars(
            count.reshape(1),
            items,
            make_requests(call, starts, lengths, inputs.block_tables),
            inputs.block_tables.reshape(-1),
            _factors(
                call,
                inputs.key_scale,
                batch,
                call.softmax_scale * (LOG2E if call.logits_soft_cap is None else 1 / call.logits_soft_cap),
            ),
            _factors(call, inputs.value_scale, batch, 1.0),
        ),
        query,
        inputs,
        out,
        config,
    )
    lse = _lse(rest[0], items, starts, tokens, config.block_q) if wants_lse else None
    return PagedAttentionOutputs(out[:, :tokens] if missing else out, lse)


def _params(call: PagedAttentionCall, config: Config) -> Params:
    product = product_dtype(call)
    exact = product == "float32" and call.precision != "default"
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return Params(call, Shape.of(call, config), sources(call), jnp.dtype(product), precision, config.cores)


def _for_all(array: Any, batch: int) -> Any:
    return jnp.broadcast_to(array, (batch, *array.shape[1:]))


def _factors(call: PagedAttentionCall, scale: Any, batch: int, factor: float) -> Any:
    """For each member and key head, `[b K]`."""
    scale = jnp.ones((1, 1), jnp.float32) if scale is None else scale.astype(jnp.float32)
    return jnp.broadcast_to(scale * factor, (batch, call.heads)).reshape(-1)


def _lanes(call: PagedAttentionCall, values: Any) -> Any:
    """A number for each query head, `[1|b, H]`, as float32 `[1|b, K, G, 128]`."""
    grouped = values.astype(jnp.float32).reshape(values.shape[0], call.heads, -1, 1)
    return jnp.broadcast_to(grouped, (*grouped.shape[:3], LANES)) * LOG2E


def _lse(blocks: Any, items: Items, starts: Any, tokens: int, tile: int) -> Any:
    """From `[items, tile, H]` to `[b, N, H]`."""
    batch, requests = starts.shape[0], starts.shape[1] - 1
    request, known = owned(starts, tokens)
    request = request + requests * jnp.arange(batch, dtype=jnp.int32)[:, None]
    first = jnp.searchsorted(items.request, jnp.arange(batch * requests, dtype=jnp.int32), method="compare_all")
    begin = jnp.clip(starts[:, :-1], 0, tokens).reshape(-1)
    token = jnp.arange(tokens, dtype=jnp.int32)[None]
    item = jnp.clip(first[request] + (token - begin[request]) // tile, 0, items.base.shape[0] - 1)
    place = jnp.clip(token - items.base[item], 0, tile - 1)
    return jnp.where(known[..., None], blocks[item, place], -jnp.inf)


def _operands(params: Params, inputs: PagedAttentionInputs) -> dict[str, tuple[Any, pl.BlockSpec]]:
    """Those that are blocks, by their names in `Blocks`."""
    call, found = params.call, {}
    requests = call.kv_lens.shape[1]

    def item_of(scalars: Scalars, core: Any, step: Any) -> Any:
        return jnp.minimum(step * params.cores + core, scalars.items.request.shape[0] - 1)

    def per_member(values: Any) -> tuple[Any, pl.BlockSpec]:
        def at(core: Any, step: Any, *refs: Any) -> tuple[Any, ...]:
            scalars = _scalars(refs)
            request = scalars.items.request[item_of(scalars, core, step)]
            member = quotient(request, requests) if values.shape[0] > 1 else 0
            return member, 0, 0, 0

        return values, pl.BlockSpec((None, *values.shape[1:]), at)

    def per_request(values: Any) -> tuple[Any, pl.BlockSpec]:
        def at(core: Any, step: Any, *refs: Any) -> tuple[Any, ...]:
            scalars = _scalars(refs)
            request = scalars.items.request[item_of(scalars, core, step)]
            member = quotient(request, requests) if values.shape[0] > 1 else 0
            return member, remainder(request, requests) if values.shape[1] > 1 else 0, 0, 0

        return values, pl.BlockSpec((None, None, *values.shape[2:]), at)

    if inputs.softmax_aux is not None:
        found["sinks"] = per_member(_lanes(call, jax.nn.logsumexp(inputs.softmax_aux.astype(jnp.float32), axis=-1)))
    if inputs.alibi_slopes is not None:
        found["slopes"] = per_member(_lanes(call, inputs.alibi_slopes))
    if inputs.qq_bias is not None:
        bias = inputs.qq_bias.astype(jnp.float32)
        finite = jnp.isfinite(bias)
        code = jnp.where(finite, 0, jnp.where(bias == -jnp.inf, MASKED, NONFINITE)).astype(jnp.float32)
        found["bias"], found["code"] = per_request(jnp.where(finite, bias, 0) * LOG2E), per_request(code)
    return found


def _scalars(refs: Any) -> Scalars:
    found = list(refs)
    return Scalars(found[0], Items(*found[1:5]), Requests(*found[5:9]), *found[9:12])


_SCALARS = 12


def _scratch(params: Params) -> Scratch:
    call, shape = params.call, params.shape
    heads, size, value_size = *call.query.shape[2:], call.value_size
    passes, rows, keys = shape.most_passes, shape.rows, shape.keys
    stored = jnp.dtype(call.key_pages.dtype)
    bias = [pltpu.VMEM((max(shape.tokens, 8), keys), jnp.float32)] * (0 if call.qq_bias is None else 2)

    def rows_of(count: int, width: int) -> Any:
        return pltpu.VMEM((pl.cdiv(width, LANES), count, min(width, LANES)), jnp.float32)

    def buffer(source: Any) -> Any:
        block = (keys, *source.tail) if source.token_major else (shape.pages, *source.block)
        return pltpu.VMEM((2, *block), stored)

    def deinterleaved(source: Any) -> Any:
        return rows_of(keys * source.rows, source.width) if source.token_major else rows_of(8, LANES)

    return Scratch(
        steps=pltpu.SMEM((1,), jnp.int32),
        queries=pltpu.VMEM((2, shape.tokens, heads, size), jnp.dtype(call.query.dtype)),
        query_rows=rows_of(shape.tokens * heads, size),
        results=pltpu.VMEM((shape.tokens, heads, value_size), jnp.dtype(call.query.dtype)),
        result_rows=rows_of(shape.tokens * heads, value_size),
        pages=tuple(buffer(source) for source in params.sources),
        deinterleaved=tuple(deinterleaved(source) for source in params.sources),
        query=pltpu.VMEM((passes, rows, size), params.product),
        row_max=pltpu.VMEM((passes, rows, LANES), jnp.float32),
        row_sum=pltpu.VMEM((passes, rows, LANES), jnp.float32),
        acc=pltpu.VMEM((passes, rows, value_size), jnp.float32),
        page_valid=pltpu.VMEM((1, keys), jnp.float32),
        bias=tuple(bias),
        query_copied=pltpu.SemaphoreType.DMA((2,)),
        pages_copied=pltpu.SemaphoreType.DMA((2,)),
        result_copied=pltpu.SemaphoreType.DMA((1,)),
    )


def _launch(params: Params, scalars: Scalars, query: Any, inputs: PagedAttentionInputs, out: Any, config: Config) -> Any:
    """Results where there are requests, and blocks of lse if they are wanted."""
    call = params.call
    pages = [array for array in (inputs.key_pages, inputs.value_pages) if array is not None]
    operands, scratch = _operands(params, inputs), _scratch(params)
    every = scalars.items.request.shape[0]
    results = [(result_like(query, out.shape, out.dtype), pl.BlockSpec(memory_space=pl.ANY))]
    if call.return_lse or call.save_residuals:
        shape = (config.block_q, call.query.shape[2])
        block = pl.BlockSpec((None, *shape), lambda core, step, *refs: (step * params.cores + core, 0, 0))
        results.append((result_like(query, (every + params.cores, *shape), jnp.float32), block))
    scratch_leaves, scratch_tree = jax.tree.flatten(scratch)

    def kernel(*refs: Any) -> None:
        given = list(refs)
        own = _scalars(given[:_SCALARS])
        query_ref, *given = given[_SCALARS:]
        page_refs, given = tuple(given[: len(pages)]), given[len(pages) :]
        named, given = dict(zip(operands, given, strict=False)), given[len(operands) + 1 :]  # out is given as zeros
        lse_ref = given[1] if len(results) > 1 else None
        parts = jax.tree.unflatten(scratch_tree, given[len(results) :])
        blocks = Blocks(
            query=query_ref,
            pages=page_refs,
            sinks=named.get("sinks"),
            slopes=named.get("slopes"),
            bias=named.get("bias"),
            code=named.get("code"),
            out=given[0],
            lse=lse_ref,
        )
        Program(params, own, blocks, parts).run()

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    steps = jnp.maximum(pl.cdiv(scalars.count[0], params.cores), 1)
    counted = OPERATION.cost(call, "forward")
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=_SCALARS,
            grid=(params.cores, steps),
            in_specs=[hbm] * (1 + len(pages)) + [spec for _, spec in operands.values()] + [hbm],
            out_specs=[spec for _, spec in results],
            scratch_shapes=scratch_leaves,
        ),
        out_shape=[result for result, _ in results],
        input_output_aliases={_SCALARS + 1 + len(pages) + len(operands): 0},
        compiler_params=compiler_params(NAME, ("parallel", "arbitrary"), vmem_bytes(call, config)),
        cost_estimate=cost_estimate(
            counted.flops, counted.flops // (2 * (call.query.shape[3] + call.value_size)), counted.bytes
        ),
        name=NAME,
    )(*jax.tree.leaves(scalars), query, *pages, *(array for array, _ in operands.values()), out)

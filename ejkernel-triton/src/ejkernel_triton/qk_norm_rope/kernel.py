"""Normalisation and rotation of the heads of query and key: each phase is one kernel that reads each of its arrays once.

A tile has some heads of some tokens, of query or of key. Tokens are counted through the batch. In backward a program loops over
its tiles in a fixed order and writes one partial sum of the gradient of its scale; XLA adds the partial sums. The gradients of
cos and sin are `rope`'s kernel over the normalised heads, which XLA drops together with these if they are unused.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.common.rows.interface import square_unit
from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall, QkNormRopeInputs, QkNormRopeOutputs
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.kernel import PER_BATCH, cdiv, storage, sum_of_partials
from ejkernel_triton._rows.splits import inverse_deviation
from ejkernel_triton.qk_norm_rope.config import BackwardConfig, ForwardConfig
from ejkernel_triton.rope.config import Config as RopeConfig
from ejkernel_triton.rope.kernel import angle_gradients, load_angles, load_pairs, store_pairs


@triton.jit
def head_numbers(i_token, i_head, length, HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """Numbers of heads as they are stored, int64 [TOKENS, STEP, 1], of tokens counted through the batch."""
    if HEADS_FIRST:
        i_batch = (i_token // length).to(tl.int64)
        return ((i_batch[:, None] * HEADS + i_head[None, :]) * length + (i_token % length)[:, None])[:, :, None]
    else:
        return (i_token.to(tl.int64)[:, None] * HEADS + i_head[None, :])[:, :, None]


@triton.jit
def load_rest(p_base, o_tile, m_tile, WIDTH: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    """The channels that are not rotated, [A, B, REST]."""
    o_rest = 2 * HALF + tl.arange(0, REST)[None, None, :]
    return tl.load(p_base + o_tile + o_rest, mask=m_tile & (o_rest < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def store_rest(p_base, o_tile, m_tile, b_rest, WIDTH: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    o_rest = 2 * HALF + tl.arange(0, REST)[None, None, :]
    tl.store(p_base + o_tile + o_rest, b_rest.to(p_base.dtype.element_ty), mask=m_tile & (o_rest < WIDTH))


@triton.jit
def load_angles_of(
    p_cos, p_sin, i_token, m_token, length, HALF: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
    PER_PAIR: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """cos, then sin, of both members of every pair, each [TOKENS, 1, BLOCK]."""
    o_angles = (i_token % length if SHARED else i_token).to(tl.int64)[:, None, None]
    b_cos_1, b_cos_2 = load_angles(p_cos, o_angles, m_token, HALF, BLOCK, INTERLEAVED, PER_PAIR)
    b_sin_1, b_sin_2 = load_angles(p_sin, o_angles, m_token, HALF, BLOCK, INTERLEAVED, PER_PAIR)
    return b_cos_1, b_cos_2, b_sin_1, b_sin_2


@triton.jit
def normalise_and_rotate(
    p_x, p_scale, p_cos, p_sin, p_out, p_rstd, i_token, i_chunk, tokens, length,
    HEADS: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, SHARED: tl.constexpr, PER_PAIR: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr, SAVE: tl.constexpr, EPSILON: tl.constexpr, SCALE_OFFSET: tl.constexpr,
):  # fmt: skip
    """One tile of forward."""
    i_head = i_chunk * STEP + tl.arange(0, STEP)
    m_token = (i_token < tokens)[:, None, None]
    m_tile = m_token & (i_head < HEADS)[None, :, None]
    i_number = head_numbers(i_token, i_head, length, HEADS, HEADS_FIRST)
    o_tile = i_number * WIDTH
    b_cos_1, b_cos_2, b_sin_1, b_sin_2 = load_angles_of(
        p_cos, p_sin, i_token, m_token, length, HALF, BLOCK, SHARED, PER_PAIR, INTERLEAVED
    )
    b_first, b_second = load_pairs(p_x, o_tile, m_tile, HALF, BLOCK, INTERLEAVED)  # [TOKENS, STEP, BLOCK]
    b_squares = tl.sum((b_first * UNIT) * (b_first * UNIT) + (b_second * UNIT) * (b_second * UNIT), axis=2)  # [TOKENS, STEP]
    if 2 * HALF < WIDTH:
        b_rest = load_rest(p_x, o_tile, m_tile, WIDTH, HALF, REST)  # [TOKENS, STEP, REST]
        b_squares += tl.sum((b_rest * UNIT) * (b_rest * UNIT), axis=2)
    b_rstd = inverse_deviation(b_squares, 0.0, WIDTH, EPSILON, UNIT)[:, :, None]  # [TOKENS, STEP, 1]
    b_first *= b_rstd
    b_second *= b_rstd
    o_scale = (i_token // length).to(tl.int64)[:, None, None] * WIDTH if SCALE == 2 else (i_token * 0)[:, None, None]
    if SCALE != 0:
        b_scale_1, b_scale_2 = load_pairs(p_scale, o_scale, m_token, HALF, BLOCK, INTERLEAVED)  # [TOKENS, 1, BLOCK]
        b_first *= b_scale_1 + SCALE_OFFSET
        b_second *= b_scale_2 + SCALE_OFFSET
    b_out_1 = b_first * b_cos_1 - b_second * b_sin_1
    b_out_2 = b_second * b_cos_2 + b_first * b_sin_2
    store_pairs(p_out, o_tile, m_tile, b_out_1, b_out_2, HALF, BLOCK, INTERLEAVED)
    if 2 * HALF < WIDTH:
        b_rest *= b_rstd
        if SCALE != 0:
            b_rest *= load_rest(p_scale, o_scale, m_token, WIDTH, HALF, REST) + SCALE_OFFSET
        store_rest(p_out, o_tile, m_tile, b_rest, WIDTH, HALF, REST)
    if SAVE:
        tl.store(p_rstd + i_number, b_rstd, mask=m_tile)


@triton.jit
def qk_norm_rope_kernel(
    p_query,
    p_key,
    p_cos,
    p_sin,
    p_query_scale,
    p_key_scale,
    tokens,
    length,
    p_query_out,
    p_key_out,
    p_query_rstd,
    p_key_rstd,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    KEY_STEP: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    SHARED: tl.constexpr,
    PER_PAIR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    SAVE: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    """One tile, those of a token beside each other."""
    QUERY_CHUNKS: tl.constexpr = (QUERY_HEADS + QUERY_STEP - 1) // QUERY_STEP
    CHUNKS: tl.constexpr = QUERY_CHUNKS + (KEY_HEADS + KEY_STEP - 1) // KEY_STEP
    i_token = tl.program_id(0) // CHUNKS * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    i_chunk = tl.program_id(0) % CHUNKS
    if i_chunk < QUERY_CHUNKS:
        normalise_and_rotate(
            p_query, p_query_scale, p_cos, p_sin, p_query_out, p_query_rstd, i_token, i_chunk, tokens, length,
            QUERY_HEADS, QUERY_STEP, QUERY_SCALE, QUERY_UNIT, WIDTH, HALF, BLOCK, REST, SHARED, PER_PAIR, INTERLEAVED,
            HEADS_FIRST, SAVE, EPSILON, SCALE_OFFSET,
        )  # fmt: skip
    else:
        normalise_and_rotate(
            p_key, p_key_scale, p_cos, p_sin, p_key_out, p_key_rstd, i_token, i_chunk - QUERY_CHUNKS, tokens, length,
            KEY_HEADS, KEY_STEP, KEY_SCALE, KEY_UNIT, WIDTH, HALF, BLOCK, REST, SHARED, PER_PAIR, INTERLEAVED,
            HEADS_FIRST, SAVE, EPSILON, SCALE_OFFSET,
        )  # fmt: skip


@triton.jit
def gradients_of_heads(
    p_x, p_scale, p_cos, p_sin, p_rstd, p_grad, p_dx, p_dscale, i_group, i_program, programs, tokens, length,
    HEADS: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, SHARED: tl.constexpr, PER_PAIR: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr, SCALE_OFFSET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The tiles of one program, every `programs`-th of the group's."""
    CHUNKS: tl.constexpr = (HEADS + STEP - 1) // STEP
    m_one = tl.full([1, 1, 1], 1, tl.int1)
    o_scale = tl.full([1, 1, 1], 0, tl.int64) + (i_group.to(tl.int64) * WIDTH if SCALE == 2 else 0)
    if SCALE != 0:
        b_scale_1, b_scale_2 = load_pairs(p_scale, o_scale, m_one, HALF, BLOCK, INTERLEAVED)  # [1, 1, BLOCK]
        b_scale_1 += SCALE_OFFSET
        b_scale_2 += SCALE_OFFSET
        if 2 * HALF < WIDTH:
            b_scale_rest = load_rest(p_scale, o_scale, m_one, WIDTH, HALF, REST) + SCALE_OFFSET
    b_sum_1 = tl.zeros([TOKENS, STEP, BLOCK], tl.float32)
    b_sum_2 = tl.zeros([TOKENS, STEP, BLOCK], tl.float32)
    b_sum_rest = tl.zeros([TOKENS, STEP, REST], tl.float32)
    for i_tile in tl.range(i_program, tl.cdiv(tokens, TOKENS) * CHUNKS, programs, num_stages=STAGES):
        i_local = i_tile // CHUNKS * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
        i_head = i_tile % CHUNKS * STEP + tl.arange(0, STEP)  # [STEP]
        i_token = i_group * tokens + i_local
        m_token = (i_local < tokens)[:, None, None]
        m_tile = m_token & (i_head < HEADS)[None, :, None]
        i_number = head_numbers(i_token, i_head, length, HEADS, HEADS_FIRST)
        o_tile = i_number * WIDTH
        b_first, b_second = load_pairs(p_x, o_tile, m_tile, HALF, BLOCK, INTERLEAVED)  # [TOKENS, STEP, BLOCK]
        b_grad_1, b_grad_2 = load_pairs(p_grad, o_tile, m_tile, HALF, BLOCK, INTERLEAVED)  # [TOKENS, STEP, BLOCK]
        b_rstd = tl.load(p_rstd + i_number, mask=m_tile, other=0.0)  # [TOKENS, STEP, 1]
        b_cos_1, b_cos_2, b_sin_1, b_sin_2 = load_angles_of(
            p_cos, p_sin, i_token, m_token, length, HALF, BLOCK, SHARED, PER_PAIR, INTERLEAVED
        )
        b_first *= b_rstd
        b_second *= b_rstd
        b_weighted_1 = b_grad_1 * b_cos_1 + b_grad_2 * b_sin_2
        b_weighted_2 = b_grad_2 * b_cos_2 - b_grad_1 * b_sin_1
        if SCALE != 0:
            b_sum_1 += b_weighted_1 * b_first
            b_sum_2 += b_weighted_2 * b_second
            b_weighted_1 *= b_scale_1
            b_weighted_2 *= b_scale_2
        b_product = tl.sum(b_weighted_1 * b_first + b_weighted_2 * b_second, axis=2)  # [TOKENS, STEP]
        if 2 * HALF < WIDTH:
            b_rest = load_rest(p_x, o_tile, m_tile, WIDTH, HALF, REST) * b_rstd  # [TOKENS, STEP, REST]
            b_weighted_rest = load_rest(p_grad, o_tile, m_tile, WIDTH, HALF, REST)  # [TOKENS, STEP, REST]
            if SCALE != 0:
                b_sum_rest += b_weighted_rest * b_rest
                b_weighted_rest *= b_scale_rest
            b_product += tl.sum(b_weighted_rest * b_rest, axis=2)
        b_mean = (b_product / WIDTH)[:, :, None]
        b_dx_1 = (b_weighted_1 - b_first * b_mean) * b_rstd
        b_dx_2 = (b_weighted_2 - b_second * b_mean) * b_rstd
        store_pairs(p_dx, o_tile, m_tile, b_dx_1, b_dx_2, HALF, BLOCK, INTERLEAVED)
        if 2 * HALF < WIDTH:
            store_rest(p_dx, o_tile, m_tile, (b_weighted_rest - b_rest * b_mean) * b_rstd, WIDTH, HALF, REST)
    if SCALE != 0:
        o_partial = tl.full([1, 1, 1], 0, tl.int64) + (i_group.to(tl.int64) * programs + i_program) * WIDTH
        b_total_1 = tl.sum(tl.sum(b_sum_1, axis=0), axis=0)[None, None, :]
        b_total_2 = tl.sum(tl.sum(b_sum_2, axis=0), axis=0)[None, None, :]
        store_pairs(p_dscale, o_partial, m_one, b_total_1, b_total_2, HALF, BLOCK, INTERLEAVED)
        if 2 * HALF < WIDTH:
            b_total_rest = tl.sum(tl.sum(b_sum_rest, axis=0), axis=0)[None, None, :]
            store_rest(p_dscale, o_partial, m_one, b_total_rest, WIDTH, HALF, REST)


@triton.jit
def qk_norm_rope_backward_kernel(
    p_query,
    p_key,
    p_cos,
    p_sin,
    p_query_scale,
    p_key_scale,
    p_query_rstd,
    p_key_rstd,
    p_query_grad,
    p_key_grad,
    tokens,
    length,
    query_programs,
    key_programs,
    p_dquery,
    p_dkey,
    p_dquery_scale,
    p_dkey_scale,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    KEY_STEP: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    SHARED: tl.constexpr,
    PER_PAIR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`tokens` tokens share one scale (a group); of a group's programs the first have query, the others key."""
    i_group = tl.program_id(0) // (query_programs + key_programs)
    i_program = tl.program_id(0) % (query_programs + key_programs)
    if i_program < query_programs:
        gradients_of_heads(
            p_query, p_query_scale, p_cos, p_sin, p_query_rstd, p_query_grad, p_dquery, p_dquery_scale, i_group, i_program,
            query_programs, tokens, length, QUERY_HEADS, QUERY_STEP, QUERY_SCALE, TOKENS, WIDTH, HALF, BLOCK, REST, SHARED,
            PER_PAIR, INTERLEAVED, HEADS_FIRST, SCALE_OFFSET, STAGES,
        )  # fmt: skip
    else:
        gradients_of_heads(
            p_key, p_key_scale, p_cos, p_sin, p_key_rstd, p_key_grad, p_dkey, p_dkey_scale, i_group, i_program - query_programs,
            key_programs, tokens, length, KEY_HEADS, KEY_STEP, KEY_SCALE, TOKENS, WIDTH, HALF, BLOCK, REST, SHARED,
            PER_PAIR, INTERLEAVED, HEADS_FIRST, SCALE_OFFSET, STAGES,
        )  # fmt: skip


def _heads(call: QkNormRopeCall) -> tuple[int, int]:
    """Of query and of key."""
    axis = 1 if call.heads_first else 2
    return call.query.shape[axis], call.key.shape[axis]


def _steps(call: QkNormRopeCall, config: ForwardConfig | BackwardConfig) -> tuple[int, int]:
    """Heads of one tile, of query and of key."""
    of_query, of_key = (min(config.heads, next_power_of_2(heads)) for heads in _heads(call))
    return of_query, of_key


def _tokens(call: QkNormRopeCall) -> tuple[int, int]:
    """Of the whole batch, and of one member."""
    length = call.query.shape[2 if call.heads_first else 1]
    return call.query.shape[0] * length, length


def _constants(call: QkNormRopeCall, inputs: QkNormRopeInputs, config: ForwardConfig | BackwardConfig) -> dict[str, Any]:
    (query_heads, key_heads), (query_step, key_step) = _heads(call), _steps(call, config)
    half, width = call.rotary_dim // 2, call.query.shape[-1]
    return {
        "QUERY_HEADS": query_heads,
        "KEY_HEADS": key_heads,
        "QUERY_STEP": query_step,
        "KEY_STEP": key_step,
        "QUERY_SCALE": storage(inputs.query_scale),
        "KEY_SCALE": storage(inputs.key_scale),
        "TOKENS": config.tokens,
        "WIDTH": width,
        "HALF": half,
        "BLOCK": next_power_of_2(half),
        "REST": next_power_of_2(max(width - 2 * half, 1)),
        "SHARED": inputs.cos.shape[0] == 1,
        "PER_PAIR": call.per_pair,
        "INTERLEAVED": call.interleaved,
        "HEADS_FIRST": call.heads_first,
        "SCALE_OFFSET": call.scale_offset,
        "num_warps": config.num_warps,
    }


def _arrays(inputs: QkNormRopeInputs) -> tuple[Any, ...]:
    """In place of what is absent or empty, something that is not read."""
    query = inputs.query
    angles = (inputs.cos, inputs.sin) if inputs.cos.size else (query, query)
    scales = (query if scale is None else scale for scale in (inputs.query_scale, inputs.key_scale))
    return (query, inputs.key, *angles, *scales)


def forward(call: QkNormRopeCall, inputs: QkNormRopeInputs, config: ForwardConfig) -> QkNormRopeOutputs:
    query, key = inputs.query, inputs.key
    save = call.save_residuals
    if not query.size:
        value = call.epsilon**-0.5 if call.epsilon else jnp.inf
        rstds = (jnp.full(x.shape[:-1], value, jnp.float32) if save else None for x in (query, key))
        return QkNormRopeOutputs(query, key, *rstds)
    tokens, length = _tokens(call)
    chunks = sum(cdiv(heads, step) for heads, step in zip(_heads(call), _steps(call, config), strict=True))
    query_out, key_out, *rstds = call_kernel(
        qk_norm_rope_kernel,
        (*_arrays(inputs), tokens, length),
        (*((x.shape, x.dtype) for x in (query, key)), *((x.shape[:-1] if save else (1,), jnp.float32) for x in (query, key))),
        grid=cdiv(tokens, config.tokens) * chunks,
        SAVE=save,
        EPSILON=call.epsilon,
        QUERY_UNIT=square_unit(query.dtype, call.epsilon),
        KEY_UNIT=square_unit(key.dtype, call.epsilon),
        **_constants(call, inputs, config),
    )
    return QkNormRopeOutputs(query_out, key_out, *(rstds if save else (None, None)))


def backward(
    call: QkNormRopeCall,
    inputs: QkNormRopeInputs,
    outputs: QkNormRopeOutputs,
    cotangents: QkNormRopeOutputs,
    config: BackwardConfig,
) -> QkNormRopeInputs:
    if not inputs.query.size:
        return QkNormRopeInputs(*(None if value is None else jnp.zeros_like(value) for value in inputs))
    tokens, length = _tokens(call)
    scales = (inputs.query_scale, inputs.key_scale)
    groups = call.query.shape[0] if PER_BATCH in map(storage, scales) else 1
    of_group = tokens // groups
    heads, steps = _heads(call), _steps(call, config)
    tiles = [cdiv(of_group, config.tokens) * cdiv(*pair) for pair in zip(heads, steps, strict=True)]
    share = cdiv(config.programs, groups)
    programs = [min(of_one, max(1, share * of_one // sum(tiles))) for of_one in tiles]

    def partial(scale: Any, count: int) -> Any:
        return (1,) if scale is None else (groups, count, call.query.shape[-1]), jnp.float32

    d_query, d_key, *d_scales = call_kernel(
        qk_norm_rope_backward_kernel,
        (*_arrays(inputs), outputs.query_rstd, outputs.key_rstd, cotangents.query, cotangents.key, of_group, length, *programs),
        (*((x.shape, x.dtype) for x in (inputs.query, inputs.key)), *map(partial, scales, programs)),
        grid=groups * sum(programs),
        STAGES=config.num_stages,
        **_constants(call, inputs, config),
    )
    d_cos, d_sin = _angle_gradients(call, inputs, outputs, cotangents, config)
    return QkNormRopeInputs(d_query, d_key, d_cos, d_sin, *map(sum_of_partials, d_scales, scales))


def _angle_gradients(
    call: QkNormRopeCall,
    inputs: QkNormRopeInputs,
    outputs: QkNormRopeOutputs,
    cotangents: QkNormRopeOutputs,
    config: BackwardConfig,
) -> tuple[Any, Any]:
    """Of cos and sin; what is rotated is formed again, in float32."""

    def rotated(x: Any, rstd: Any, scale: Any) -> Any:
        normalised = x.astype(jnp.float32) * rstd[..., None]
        return normalised if scale is None else normalised * (scale.astype(jnp.float32)[:, None, None] + call.scale_offset)

    heads = (
        rotated(inputs.query, outputs.query_rstd, inputs.query_scale),
        rotated(inputs.key, outputs.key_rstd, inputs.key_scale),
    )
    launch = RopeConfig(config.tokens, config.heads, config.num_warps)
    return angle_gradients(call, heads, (cotangents.query, cotangents.key), inputs.cos, inputs.sin, launch)

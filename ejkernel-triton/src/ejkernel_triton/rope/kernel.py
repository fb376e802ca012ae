"""Rotary position embedding: one pass over query and key; a program loads cos and sin once for its heads.

The gradient of query and key is the same kernel with the transposed rotation. A second kernel computes the gradients of cos and
sin, sums over heads and over the batch that shares them, so that XLA drops it if they are unused. It reads query, key and their
gradients again, a third more traffic than one kernel for everything. A program sums heads in a fixed order; if few tokens leave
the device idle, several programs split the batch, and XLA adds their sums.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportArgumentType=false
# ruff: noqa: SIM102 - static and dynamic conditions stay apart
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.rope.interface import RopeCall, RopeInputs, RopeOutputs
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.rope.config import Config

_PROGRAMS = 1056
"""Programs of the angle gradients below which the batch is split: eight per multiprocessor of an H200."""


@triton.jit
def load_pairs(p_base, o_tile, m_tile, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both members of the rotated pairs at offsets [A, B, 1], float32 [A, B, BLOCK]."""
    if INTERLEAVED:
        o_channel = tl.arange(0, 2 * BLOCK)[None, None, :]
        b_both = tl.load(p_base + o_tile + o_channel, mask=m_tile & (o_channel < 2 * HALF), other=0.0).to(tl.float32)
        b_first, b_second = tl.split(tl.reshape(b_both, [b_both.shape[0], b_both.shape[1], BLOCK, 2]))
    else:
        o_channel = tl.arange(0, BLOCK)[None, None, :]
        m_channel = m_tile & (o_channel < HALF)
        b_first = tl.load(p_base + o_tile + o_channel, mask=m_channel, other=0.0).to(tl.float32)
        b_second = tl.load(p_base + o_tile + HALF + o_channel, mask=m_channel, other=0.0).to(tl.float32)
    return b_first, b_second


@triton.jit
def store_pairs(p_base, o_tile, m_tile, b_first, b_second, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        o_channel = tl.arange(0, 2 * BLOCK)[None, None, :]
        b_both = tl.reshape(tl.join(b_first, b_second), [b_first.shape[0], b_first.shape[1], 2 * BLOCK])
        tl.store(p_base + o_tile + o_channel, b_both.to(p_base.dtype.element_ty), mask=m_tile & (o_channel < 2 * HALF))
    else:
        o_channel = tl.arange(0, BLOCK)[None, None, :]
        m_channel = m_tile & (o_channel < HALF)
        tl.store(p_base + o_tile + o_channel, b_first.to(p_base.dtype.element_ty), mask=m_channel)
        tl.store(p_base + o_tile + HALF + o_channel, b_second.to(p_base.dtype.element_ty), mask=m_channel)


@triton.jit
def load_angles(
    p_angles, o_token, m_token, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, PER_PAIR: tl.constexpr
):
    """cos or sin of both members of every pair, [TOKENS, 1, BLOCK]; `o_token` [TOKENS, 1, 1] counts rows of angles."""
    if PER_PAIR:
        o_channel = tl.arange(0, BLOCK)[None, None, :]
        m_angles = m_token & (o_channel < HALF)
        b_first = tl.load(p_angles + o_token * HALF + o_channel, mask=m_angles, other=0.0).to(tl.float32)
        b_second = b_first
    else:
        b_first, b_second = load_pairs(p_angles, o_token * (2 * HALF), m_token, HALF, BLOCK, INTERLEAVED)
    return b_first, b_second


@triton.jit
def head_offsets(i_batch, i_token, i_head, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """Where the heads of the tokens begin, int64 [TOKENS, HEADS of a step, 1]."""
    if HEADS_FIRST:
        o_head = (i_batch * HEADS + i_head).to(tl.int64)[None, :, None] * length + i_token[:, None, None]
    else:
        o_head = (i_batch.to(tl.int64) * length + i_token)[:, None, None] * HEADS + i_head[None, :, None]
    return o_head * WIDTH


@triton.jit
def rotate_heads(
    p_x,
    p_out,
    b_cos_1,
    b_cos_2,
    b_sin_1,
    b_sin_2,
    i_batch,
    i_token,
    i_first_head,
    length,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """SPAN heads from the first one on, as far as there are HEADS."""
    for i_step in tl.range(0, (SPAN + STEP - 1) // STEP):
        i_head = i_first_head + i_step * STEP + tl.arange(0, STEP)
        m_tile = (i_token < length)[:, None, None] & (i_head < HEADS)[None, :, None]
        o_tile = head_offsets(i_batch, i_token, i_head, length, HEADS, WIDTH, HEADS_FIRST)
        b_first, b_second = load_pairs(p_x, o_tile, m_tile, HALF, BLOCK, INTERLEAVED)  # [TOKENS, STEP, BLOCK]
        if INVERSE:
            b_out_1 = b_first * b_cos_1 + b_second * b_sin_2
            b_out_2 = b_second * b_cos_2 - b_first * b_sin_1
        else:
            b_out_1 = b_first * b_cos_1 - b_second * b_sin_1
            b_out_2 = b_second * b_cos_2 + b_first * b_sin_2
        store_pairs(p_out, o_tile, m_tile, b_out_1, b_out_2, HALF, BLOCK, INTERLEAVED)
        if 2 * HALF < WIDTH:
            o_rest = 2 * HALF + tl.arange(0, REST)[None, None, :]
            m_rest = m_tile & (o_rest < WIDTH)
            tl.store(p_out + o_tile + o_rest, tl.load(p_x + o_tile + o_rest, mask=m_rest), mask=m_rest)


@triton.jit
def rope_kernel(
    p_query,
    p_key,
    p_cos,
    p_sin,
    length,
    p_query_out,
    p_key_out,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    KEY_STEP: tl.constexpr,
    SHARED_COS: tl.constexpr,
    SHARED_SIN: tl.constexpr,
    PER_PAIR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    INVERSE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Some tokens with all heads of query and key, or with SPAN heads of one of them."""
    QUERY_CHUNKS: tl.constexpr = 1 if SPAN == 0 else (QUERY_HEADS + SPAN - 1) // SPAN
    CHUNKS: tl.constexpr = 1 if SPAN == 0 else QUERY_CHUNKS + (KEY_HEADS + SPAN - 1) // SPAN
    QUERY_SPAN: tl.constexpr = QUERY_HEADS if SPAN == 0 or SPAN > QUERY_HEADS else SPAN
    KEY_SPAN: tl.constexpr = KEY_HEADS if SPAN == 0 or SPAN > KEY_HEADS else SPAN
    tiles = tl.cdiv(length, TOKENS)
    i_batch = tl.program_id(0) // (tiles * CHUNKS)
    i_rest = tl.program_id(0) % (tiles * CHUNKS)
    i_tile = i_rest % tiles if HEADS_FIRST else i_rest // CHUNKS
    i_chunk = i_rest // tiles if HEADS_FIRST else i_rest % CHUNKS
    i_token = i_tile * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    o_token = i_token.to(tl.int64)[:, None, None]
    o_batch = i_batch.to(tl.int64) * length
    m_token = (i_token < length)[:, None, None]
    o_cos = o_token if SHARED_COS else o_token + o_batch
    o_sin = o_token if SHARED_SIN else o_token + o_batch
    b_cos_1, b_cos_2 = load_angles(p_cos, o_cos, m_token, HALF, BLOCK, INTERLEAVED, PER_PAIR)  # [TOKENS, 1, BLOCK]
    b_sin_1, b_sin_2 = load_angles(p_sin, o_sin, m_token, HALF, BLOCK, INTERLEAVED, PER_PAIR)
    rotates_query = i_chunk < QUERY_CHUNKS
    rotates_key = (i_chunk >= QUERY_CHUNKS) | (SPAN == 0)
    if rotates_query:
        rotate_heads(
            p_query, p_query_out, b_cos_1, b_cos_2, b_sin_1, b_sin_2, i_batch, i_token, i_chunk * SPAN, length,
            QUERY_HEADS, QUERY_SPAN, QUERY_STEP, WIDTH, HALF, BLOCK, REST, INTERLEAVED, HEADS_FIRST, INVERSE,
        )  # fmt: skip
    if KEY_HEADS != 0:
        if rotates_key:
            i_first_key = tl.maximum(i_chunk - QUERY_CHUNKS, 0) * SPAN
            rotate_heads(
                p_key, p_key_out, b_cos_1, b_cos_2, b_sin_1, b_sin_2, i_batch, i_token, i_first_key, length,
                KEY_HEADS, KEY_SPAN, KEY_STEP, WIDTH, HALF, BLOCK, REST, INTERLEAVED, HEADS_FIRST, INVERSE,
            )  # fmt: skip


@triton.jit
def sum_over_heads(
    p_x,
    p_grad,
    i_first,
    i_last,
    i_token,
    length,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_PAIR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    """Sums over the heads of batch members [i_first, i_last): for cos, then sin, of the pairs' first and second members.

    Each thread sums its heads; threads are combined once at the end. Sums per pair are in the first sum of cos and of sin. Each
    is [TOKENS, BLOCK].
    """
    STEPS: tl.constexpr = (HEADS + STEP - 1) // STEP
    b_zero = tl.zeros([i_token.shape[0], STEP, BLOCK], tl.float32)
    b_cos_1, b_cos_2, b_sin_1, b_sin_2 = b_zero, b_zero, b_zero, b_zero
    for i_step in tl.range(i_first * STEPS, i_last * STEPS):
        i_head = i_step % STEPS * STEP + tl.arange(0, STEP)
        m_tile = (i_token < length)[:, None, None] & (i_head < HEADS)[None, :, None]
        i_batch = tl.full((), 0, tl.int64) + i_step // STEPS
        o_tile = head_offsets(i_batch, i_token, i_head, length, HEADS, WIDTH, HEADS_FIRST)
        b_first, b_second = load_pairs(p_x, o_tile, m_tile, HALF, BLOCK, INTERLEAVED)  # [TOKENS, STEP, BLOCK]
        b_grad_1, b_grad_2 = load_pairs(p_grad, o_tile, m_tile, HALF, BLOCK, INTERLEAVED)
        if PER_PAIR:
            b_cos_1 += b_grad_1 * b_first + b_grad_2 * b_second
            b_sin_1 += b_grad_2 * b_first - b_grad_1 * b_second
        else:
            b_cos_1 += b_grad_1 * b_first
            b_cos_2 += b_grad_2 * b_second
            b_sin_1 -= b_grad_1 * b_second
            b_sin_2 += b_grad_2 * b_first
    if PER_PAIR:
        b_none = tl.zeros([i_token.shape[0], BLOCK], tl.float32)
        return tl.sum(b_cos_1, axis=1), b_none, tl.sum(b_sin_1, axis=1), b_none
    return tl.sum(b_cos_1, axis=1), tl.sum(b_cos_2, axis=1), tl.sum(b_sin_1, axis=1), tl.sum(b_sin_2, axis=1)


@triton.jit
def rope_angle_gradients_kernel(
    p_query,
    p_key,
    p_query_grad,
    p_key_grad,
    length,
    members,
    splits,
    p_dcos,
    p_dsin,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    KEY_STEP: tl.constexpr,
    PER_PAIR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    """`members` of the batch share a row of angles, split over `splits` programs."""
    tiles = tl.cdiv(length, TOKENS)
    i_split = tl.program_id(0) // tiles
    i_token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    of_split = tl.cdiv(members, splits)
    i_first = i_split // splits * members + tl.minimum(i_split % splits * of_split, members)
    i_last = i_split // splits * members + tl.minimum((i_split % splits + 1) * of_split, members)
    b_cos_1, b_cos_2, b_sin_1, b_sin_2 = sum_over_heads(
        p_query, p_query_grad, i_first, i_last, i_token, length,
        QUERY_HEADS, QUERY_STEP, WIDTH, HALF, BLOCK, PER_PAIR, INTERLEAVED, HEADS_FIRST,
    )  # fmt: skip
    if KEY_HEADS != 0:
        b_key_cos_1, b_key_cos_2, b_key_sin_1, b_key_sin_2 = sum_over_heads(
            p_key, p_key_grad, i_first, i_last, i_token, length,
            KEY_HEADS, KEY_STEP, WIDTH, HALF, BLOCK, PER_PAIR, INTERLEAVED, HEADS_FIRST,
        )  # fmt: skip
        b_cos_1 += b_key_cos_1
        b_cos_2 += b_key_cos_2
        b_sin_1 += b_key_sin_1
        b_sin_2 += b_key_sin_2
    o_token = (i_split.to(tl.int64) * length + i_token)[:, None, None]
    m_token = (i_token < length)[:, None, None]
    if PER_PAIR:
        o_pair = tl.arange(0, BLOCK)[None, None, :]
        m_pair = m_token & (o_pair < HALF)
        b_cos = b_cos_1[:, None, :].to(p_dcos.dtype.element_ty)
        b_sin = b_sin_1[:, None, :].to(p_dsin.dtype.element_ty)
        tl.store(p_dcos + o_token * HALF + o_pair, b_cos, mask=m_pair)
        tl.store(p_dsin + o_token * HALF + o_pair, b_sin, mask=m_pair)
    else:
        o_angles = o_token * (2 * HALF)
        store_pairs(p_dcos, o_angles, m_token, b_cos_1[:, None, :], b_cos_2[:, None, :], HALF, BLOCK, INTERLEAVED)
        store_pairs(p_dsin, o_angles, m_token, b_sin_1[:, None, :], b_sin_2[:, None, :], HALF, BLOCK, INTERLEAVED)


def _constants(call: RopeCall, config: Config) -> dict[str, Any]:
    """The constants of both kernels; a step has at most as many heads as there are."""
    axis = 1 if call.heads_first else 2
    query_heads, key_heads = call.query.shape[axis], 0 if call.key is None else call.key.shape[axis]
    half = call.rotary_dim // 2
    return {
        "QUERY_HEADS": query_heads,
        "KEY_HEADS": key_heads,
        "QUERY_STEP": min(config.heads, next_power_of_2(query_heads)),
        "KEY_STEP": min(config.heads, next_power_of_2(max(key_heads, 1))),
        "TOKENS": config.tokens,
        "WIDTH": call.query.shape[-1],
        "HALF": half,
        "BLOCK": next_power_of_2(half),
        "PER_PAIR": call.per_pair,
        "INTERLEAVED": call.interleaved,
        "HEADS_FIRST": call.heads_first,
        "num_warps": config.num_warps,
    }


def _chunks(constants: dict[str, Any], span: int) -> int:
    """Programs that share the heads of a token."""
    return sum(-(-constants[name] // span) for name in ("QUERY_HEADS", "KEY_HEADS")) if span else 1


def _length(call: RopeCall) -> int:
    return call.query.shape[2 if call.heads_first else 1]


def _rotate(call: RopeCall, query: Any, key: Any, cos: Any, sin: Any, config: Config, *, inverse: bool) -> tuple[Any, Any]:
    """query and key, rotated; key may be None."""
    if not call.rotary_dim or not query.size:
        return query + -0.0, None if key is None else key + -0.0  # changes no bit
    length, constants = _length(call), _constants(call, config)
    query_out, key_out = call_kernel(
        rope_kernel,
        (query, query if key is None else key, cos, sin, length),
        ((query.shape, query.dtype), ((1,), query.dtype) if key is None else (key.shape, key.dtype)),
        grid=query.shape[0] * -(-length // config.tokens) * _chunks(constants, config.span),
        REST=next_power_of_2(max(query.shape[-1] - call.rotary_dim, 1)),
        SHARED_COS=cos.shape[0] == 1,
        SHARED_SIN=sin.shape[0] == 1,
        INVERSE=inverse,
        SPAN=config.span,
        **constants,
    )
    return query_out, None if key is None else key_out


def forward(call: RopeCall, inputs: RopeInputs, config: Config) -> RopeOutputs:
    return RopeOutputs(*_rotate(call, *inputs, config, inverse=False))


def angle_gradients(call: Any, heads: Any, gradients: Any, cos: Any, sin: Any, config: Config) -> tuple[Any, Any]:
    """Of cos and sin, from pairs of query and key, and from those of the gradients of their rotations; key may be None.

    `call` has the facts of a `RotaryCall`, and `key`.
    """
    (query, key), (d_query, d_key) = heads, gradients
    if not cos.size or not query.size:
        return jnp.zeros_like(cos), jnp.zeros_like(sin)
    length = _length(call)
    groups = max(cos.shape[0], sin.shape[0])
    members, tiles = query.shape[0] // groups, -(-length // config.tokens)
    splits = min(members, -(-_PROGRAMS // (groups * tiles)))

    def result(angles: Any) -> Any:
        whole = splits == 1 and angles.shape[0] == groups
        return (groups * splits, *angles.shape[1:]), angles.dtype if whole else jnp.float32

    def finished(gradient: Any, angles: Any) -> Any:
        """If only one of cos and sin is shared by the batch, its gradient was computed per member."""
        if gradient.shape == angles.shape:
            return gradient
        shape = (angles.shape[0], -1, *angles.shape[1:])
        return jnp.sum(gradient.reshape(shape), axis=1).astype(angles.dtype)

    d_cos, d_sin = call_kernel(
        rope_angle_gradients_kernel,
        (query, query if key is None else key, d_query, d_query if key is None else d_key, length, members, splits),
        (result(cos), result(sin)),
        grid=groups * splits * tiles,
        **_constants(call, config),
    )
    return finished(d_cos, cos), finished(d_sin, sin)


def backward(call: RopeCall, inputs: RopeInputs, outputs: RopeOutputs, cotangents: RopeOutputs, config: Config) -> RopeInputs:
    query, key, cos, sin = inputs
    d_query, d_key = _rotate(call, cotangents.query, cotangents.key, cos, sin, config, inverse=True)
    d_angles = angle_gradients(call, (query, key), (cotangents.query, cotangents.key), cos, sin, config)
    return RopeInputs(d_query, d_key, *d_angles)

"""Rotary position embedding: one pass over query and key, whose cos and sin a program reads once for all heads.

The gradient of query and key is the same kernel with the transposed rotation. The gradients of cos and sin, sums over heads and
over the batch that shares them, are made by a kernel of their own, so that XLA drops it where nobody asks for them.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.rope.interface import RopeCall, RopeInputs, RopeOutputs
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.config import padded
from ejkernel_triton.rope.config import Config


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
    length,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    INVERSE: tl.constexpr,
):
    for i_step in tl.range(0, (HEADS + STEP - 1) // STEP):
        i_head = i_step * STEP + tl.arange(0, STEP)
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
):
    tiles = tl.cdiv(length, TOKENS)
    i_batch = tl.program_id(0) // tiles
    i_token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    o_token = i_token.to(tl.int64)[:, None, None]
    o_batch = i_batch.to(tl.int64) * length
    m_token = (i_token < length)[:, None, None]
    o_cos = o_token if SHARED_COS else o_token + o_batch
    o_sin = o_token if SHARED_SIN else o_token + o_batch
    b_cos_1, b_cos_2 = load_angles(p_cos, o_cos, m_token, HALF, BLOCK, INTERLEAVED, PER_PAIR)  # [TOKENS, 1, BLOCK]
    b_sin_1, b_sin_2 = load_angles(p_sin, o_sin, m_token, HALF, BLOCK, INTERLEAVED, PER_PAIR)
    rotate_heads(
        p_query, p_query_out, b_cos_1, b_cos_2, b_sin_1, b_sin_2, i_batch, i_token, length,
        QUERY_HEADS, QUERY_STEP, WIDTH, HALF, BLOCK, REST, INTERLEAVED, HEADS_FIRST, INVERSE,
    )  # fmt: skip
    if KEY_HEADS != 0:
        rotate_heads(
            p_key, p_key_out, b_cos_1, b_cos_2, b_sin_1, b_sin_2, i_batch, i_token, length,
            KEY_HEADS, KEY_STEP, WIDTH, HALF, BLOCK, REST, INTERLEAVED, HEADS_FIRST, INVERSE,
        )  # fmt: skip


@triton.jit
def add_angle_gradients(
    b_sums,
    p_x,
    p_grad,
    i_batch,
    i_token,
    length,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    """Add the heads of one array to the sums (cos, sin of the first members, then of the second), [TOKENS, BLOCK] each."""
    b_cos_1, b_cos_2, b_sin_1, b_sin_2 = b_sums
    for i_step in tl.range(0, (HEADS + STEP - 1) // STEP):
        i_head = i_step * STEP + tl.arange(0, STEP)
        m_tile = (i_token < length)[:, None, None] & (i_head < HEADS)[None, :, None]
        o_tile = head_offsets(i_batch, i_token, i_head, length, HEADS, WIDTH, HEADS_FIRST)
        b_first, b_second = load_pairs(p_x, o_tile, m_tile, HALF, BLOCK, INTERLEAVED)  # [TOKENS, STEP, BLOCK]
        b_grad_1, b_grad_2 = load_pairs(p_grad, o_tile, m_tile, HALF, BLOCK, INTERLEAVED)
        b_cos_1 += tl.sum(b_grad_1 * b_first, axis=1)
        b_cos_2 += tl.sum(b_grad_2 * b_second, axis=1)
        b_sin_1 -= tl.sum(b_grad_1 * b_second, axis=1)
        b_sin_2 += tl.sum(b_grad_2 * b_first, axis=1)
    return b_cos_1, b_cos_2, b_sin_1, b_sin_2


@triton.jit
def rope_angle_gradients_kernel(
    p_query,
    p_key,
    p_query_grad,
    p_key_grad,
    length,
    members,
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
    """`members` of the batch share a row of angles."""
    tiles = tl.cdiv(length, TOKENS)
    i_group = tl.program_id(0) // tiles
    i_token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    b_zero = tl.zeros([TOKENS, BLOCK], tl.float32)
    b_cos_1, b_cos_2, b_sin_1, b_sin_2 = b_zero, b_zero, b_zero, b_zero
    for i_member in tl.range(0, members):
        i_batch = i_group * members + i_member
        b_cos_1, b_cos_2, b_sin_1, b_sin_2 = add_angle_gradients(
            (b_cos_1, b_cos_2, b_sin_1, b_sin_2), p_query, p_query_grad, i_batch, i_token, length,
            QUERY_HEADS, QUERY_STEP, WIDTH, HALF, BLOCK, INTERLEAVED, HEADS_FIRST,
        )  # fmt: skip
        if KEY_HEADS != 0:
            b_cos_1, b_cos_2, b_sin_1, b_sin_2 = add_angle_gradients(
                (b_cos_1, b_cos_2, b_sin_1, b_sin_2), p_key, p_key_grad, i_batch, i_token, length,
                KEY_HEADS, KEY_STEP, WIDTH, HALF, BLOCK, INTERLEAVED, HEADS_FIRST,
            )  # fmt: skip
    o_token = (i_group.to(tl.int64) * length + i_token)[:, None, None]
    m_token = (i_token < length)[:, None, None]
    if PER_PAIR:
        o_pair = tl.arange(0, BLOCK)[None, None, :]
        m_pair = m_token & (o_pair < HALF)
        b_cos = (b_cos_1 + b_cos_2)[:, None, :].to(p_dcos.dtype.element_ty)
        b_sin = (b_sin_1 + b_sin_2)[:, None, :].to(p_dsin.dtype.element_ty)
        tl.store(p_dcos + o_token * HALF + o_pair, b_cos, mask=m_pair)
        tl.store(p_dsin + o_token * HALF + o_pair, b_sin, mask=m_pair)
    else:
        o_angles = o_token * (2 * HALF)
        store_pairs(p_dcos, o_angles, m_token, b_cos_1[:, None, :], b_cos_2[:, None, :], HALF, BLOCK, INTERLEAVED)
        store_pairs(p_dsin, o_angles, m_token, b_sin_1[:, None, :], b_sin_2[:, None, :], HALF, BLOCK, INTERLEAVED)


def _constants(call: RopeCall, config: Config) -> dict[str, Any]:
    """What both kernels are compiled for; heads of a step are not more than there are."""
    axis = 1 if call.heads_first else 2
    query_heads, key_heads = call.query.shape[axis], 0 if call.key is None else call.key.shape[axis]
    half = call.rotary_dim // 2
    return {
        "QUERY_HEADS": query_heads,
        "KEY_HEADS": key_heads,
        "QUERY_STEP": min(config.heads, padded(query_heads)),
        "KEY_STEP": min(config.heads, padded(max(key_heads, 1))),
        "TOKENS": config.tokens,
        "WIDTH": call.query.shape[-1],
        "HALF": half,
        "BLOCK": padded(half),
        "PER_PAIR": call.per_pair,
        "INTERLEAVED": call.interleaved,
        "HEADS_FIRST": call.heads_first,
        "num_warps": config.num_warps,
    }


def _length(call: RopeCall) -> int:
    return call.query.shape[2 if call.heads_first else 1]


def _rotate(call: RopeCall, query: Any, key: Any, cos: Any, sin: Any, config: Config, *, inverse: bool) -> tuple[Any, Any]:
    """query and key, rotated; key may be None."""
    if not call.rotary_dim or not query.size:
        return query + -0.0, None if key is None else key + -0.0  # changes no bit
    length = _length(call)
    query_out, key_out = call_kernel(
        rope_kernel,
        (query, query if key is None else key, cos, sin, length),
        ((query.shape, query.dtype), ((1,), query.dtype) if key is None else (key.shape, key.dtype)),
        grid=query.shape[0] * -(-length // config.tokens),
        REST=padded(max(query.shape[-1] - call.rotary_dim, 1)),
        SHARED_COS=cos.shape[0] == 1,
        SHARED_SIN=sin.shape[0] == 1,
        INVERSE=inverse,
        **_constants(call, config),
    )
    return query_out, None if key is None else key_out


def forward(call: RopeCall, inputs: RopeInputs, config: Config) -> RopeOutputs:
    return RopeOutputs(*_rotate(call, *inputs, config, inverse=False))


def backward(call: RopeCall, inputs: RopeInputs, outputs: RopeOutputs, cotangents: RopeOutputs, config: Config) -> RopeInputs:
    query, key, cos, sin = inputs
    d_query, d_key = _rotate(call, cotangents.query, cotangents.key, cos, sin, config, inverse=True)
    if not cos.size or not query.size:
        return RopeInputs(d_query, d_key, jnp.zeros_like(cos), jnp.zeros_like(sin))
    length = _length(call)
    gradients = (cotangents.query, cotangents.query if key is None else cotangents.key)
    groups = max(cos.shape[0], sin.shape[0])

    def result(angles: Any) -> Any:
        return (groups, *angles.shape[1:]), angles.dtype if angles.shape[0] == groups else jnp.float32

    def finished(gradient: Any, angles: Any) -> Any:
        """Where only one of cos and sin is shared over the batch, its gradient was made for each member."""
        same = angles.shape[0] == groups
        return gradient if same else jnp.sum(gradient, axis=0, keepdims=True).astype(angles.dtype)

    d_cos, d_sin = call_kernel(
        rope_angle_gradients_kernel,
        (query, query if key is None else key, *gradients, length, query.shape[0] // groups),
        (result(cos), result(sin)),
        grid=groups * -(-length // config.tokens),
        **_constants(call, config),
    )
    return RopeInputs(d_query, d_key, finished(d_cos, cos), finished(d_sin, sin))

"""Logits of a few tokens in registers; the k choices are k passes that take the largest, at the lowest index.

The gradient reads the chosen logits alone, but for a softmax over all, and puts each value in its place by comparing indices.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.moe_route.interface import TINY, MoeRouteCall, MoeRouteInputs, MoeRouteOutputs
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.moe_route.config import Config

NOTHING = tl.constexpr(float("-inf"))
ABOVE_ALL = tl.constexpr(float("inf"))
SMALLEST = tl.constexpr(TINY)


@triton.jit
def softmax_rows(b_logits):
    """Over axis 1; 0 where all are -inf."""
    b_max = tl.max(b_logits, axis=1)
    b_powers = tl.exp(b_logits - tl.where(b_max == NOTHING, 0.0, b_max)[:, None])
    b_powers = tl.where(b_logits == NOTHING, 0.0, b_powers)
    b_total = tl.sum(b_powers, axis=1)
    return b_powers / tl.where(b_total == 0.0, 1.0, b_total)[:, None]


@triton.jit
def first_of(b_values, b_best, o_place, PLACES: tl.constexpr):
    """The lowest place that has the best value."""
    return tl.min(tl.where(b_values == b_best[:, None], o_place[None, :], PLACES), axis=1)


@triton.jit
def in_best_groups(
    b_rank, b_worth, o_expert, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, SUMS: tl.constexpr
):
    """`b_rank`, -inf outside of each token's best groups."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    GROUP_BLOCK: tl.constexpr = triton.next_power_of_2(GROUPS)
    o_group = tl.arange(0, GROUP_BLOCK)  # [GROUP_BLOCK]
    b_values = tl.full([b_rank.shape[0], GROUP_BLOCK], NOTHING, tl.float32)
    for group in tl.static_range(GROUPS):
        b_own = tl.where((o_expert // SIZE == group)[None, :], b_worth, NOTHING)
        b_value = tl.max(b_own, axis=1)
        if SUMS and SIZE > 1:
            b_first = first_of(b_own, b_value, o_expert, b_rank.shape[1])
            b_second = tl.max(tl.where(o_expert[None, :] == b_first[:, None], NOTHING, b_own), axis=1)
            b_value += tl.where(b_second == NOTHING, 0.0, b_second)
        b_values = tl.where((o_group == group)[None, :], b_value[:, None], b_values)
    b_admitted = o_expert[None, :] < tl.zeros([b_rank.shape[0]], tl.int32)[:, None]
    for _ in tl.static_range(TOP):
        b_group = first_of(b_values, tl.max(b_values, axis=1), o_group, GROUP_BLOCK)
        b_admitted = b_admitted | (o_expert[None, :] // SIZE == b_group[:, None])
        b_values = tl.where(o_group[None, :] == b_group[:, None], NOTHING, b_values)
    return tl.where(b_admitted, b_rank, NOTHING)


@triton.jit
def moe_route_forward_kernel(
    p_logits,
    p_bias,
    rows,
    tokens,
    p_weights,
    p_experts,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARED_BIAS: tl.constexpr,
):
    i_token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS], of the whole batch
    m_token = i_token < rows
    o_expert, o_choice = tl.arange(0, BLOCK), tl.arange(0, CHOICE_BLOCK)
    m_tile = m_token[:, None] & (o_expert < EXPERTS)[None, :]
    o_tile = i_token.to(tl.int64)[:, None] * EXPERTS + o_expert[None, :]
    b_logits = tl.load(p_logits + o_tile, mask=m_tile, other=NOTHING).to(tl.float32)  # [TOKENS, BLOCK]
    b_rank = b_logits
    b_worth = b_logits
    if HAS_BIAS or (GROUPS > 1 and not SOFTMAX):
        b_worth = softmax_rows(b_logits) if SOFTMAX else tl.sigmoid(b_logits)
        if HAS_BIAS:
            i_batch = i_token * 0 if SHARED_BIAS else i_token // tokens
            o_bias = i_batch[:, None] * EXPERTS + o_expert[None, :]
            b_worth += tl.load(p_bias + o_bias, mask=m_tile, other=0.0).to(tl.float32)
        b_worth = tl.where(b_worth != b_worth, ABOVE_ALL, b_worth)
        b_worth = tl.where(b_logits == NOTHING, NOTHING, b_worth)
        if HAS_BIAS:
            b_rank = b_worth
    b_rank = tl.where(b_rank != b_rank, ABOVE_ALL, b_rank)
    if GROUPS > 1:
        b_rank = in_best_groups(b_rank, b_rank if SOFTMAX else b_worth, o_expert, EXPERTS, GROUPS, TOP_GROUPS, not SOFTMAX)

    b_chosen = tl.full([TOKENS, CHOICE_BLOCK], NOTHING, tl.float32)
    b_experts = tl.full([TOKENS, CHOICE_BLOCK], -1, tl.int32)
    for choice in range(CHOICES):
        b_best = tl.max(b_rank, axis=1)  # [TOKENS]
        b_expert = first_of(b_rank, b_best, o_expert, BLOCK)
        m_expert = o_expert[None, :] == b_expert[:, None]  # [TOKENS, BLOCK]
        m_choice = (o_choice == choice)[None, :] & (b_best > NOTHING)[:, None]
        b_logit = tl.sum(tl.where(m_expert, b_logits, 0.0), axis=1)
        b_chosen = tl.where(m_choice, b_logit[:, None], b_chosen)
        b_experts = tl.where(m_choice, b_expert[:, None], b_experts)
        b_rank = tl.where(m_expert, NOTHING, b_rank)

    b_taken = b_experts >= 0  # [TOKENS, CHOICE_BLOCK]
    if SOFTMAX and NORMALIZE:
        b_weights = softmax_rows(b_chosen)
    elif SOFTMAX:
        b_max = tl.max(b_logits, axis=1)
        b_max = tl.where(b_max == NOTHING, 0.0, b_max)
        b_total = tl.sum(tl.exp(b_logits - b_max[:, None]), axis=1)
        b_weights = tl.exp(b_chosen - b_max[:, None]) / tl.where(b_total == 0.0, 1.0, b_total)[:, None]
    else:
        b_weights = tl.where(b_taken, tl.sigmoid(b_chosen), 0.0)
        if NORMALIZE:
            b_weights = b_weights / (tl.sum(b_weights, axis=1) + SMALLEST)[:, None]
    m_out = m_token[:, None] & (o_choice < CHOICES)[None, :]
    o_out = i_token.to(tl.int64)[:, None] * CHOICES + o_choice[None, :]
    tl.store(p_weights + o_out, tl.where(b_taken, SCALE * b_weights, 0.0), mask=m_out)
    tl.store(p_experts + o_out, b_experts, mask=m_out)


@triton.jit
def moe_route_backward_kernel(
    p_logits,
    p_experts,
    p_grad,
    rows,
    p_dlogits,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
):
    i_token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS], of the whole batch
    m_token = i_token < rows
    o_expert, o_choice = tl.arange(0, BLOCK), tl.arange(0, CHOICE_BLOCK)
    m_tile = m_token[:, None] & (o_expert < EXPERTS)[None, :]
    o_tile = i_token.to(tl.int64)[:, None] * EXPERTS + o_expert[None, :]
    m_chosen = m_token[:, None] & (o_choice < CHOICES)[None, :]
    o_chosen = i_token.to(tl.int64)[:, None] * CHOICES + o_choice[None, :]
    b_experts = tl.load(p_experts + o_chosen, mask=m_chosen, other=-1)  # [TOKENS, CHOICE_BLOCK]
    m_taken = m_chosen & (b_experts >= 0)
    b_grad = SCALE * tl.load(p_grad + o_chosen, mask=m_taken, other=0.0)  # [TOKENS, CHOICE_BLOCK]
    if SOFTMAX and not NORMALIZE:
        b_logits = tl.load(p_logits + o_tile, mask=m_tile, other=NOTHING).to(tl.float32)  # [TOKENS, BLOCK]
        b_values = b_grad
    else:
        o_logit = i_token.to(tl.int64)[:, None] * EXPERTS + b_experts
        b_chosen = tl.load(p_logits + o_logit, mask=m_taken, other=NOTHING).to(tl.float32)  # [TOKENS, CHOICE_BLOCK]
        if SOFTMAX:
            b_scores = softmax_rows(b_chosen)
            b_values = b_scores * (b_grad - tl.sum(b_scores * b_grad, axis=1)[:, None])
        else:
            b_scores = tl.where(m_taken, tl.sigmoid(b_chosen), 0.0)
            if NORMALIZE:
                b_total = tl.sum(b_scores, axis=1) + SMALLEST
                b_mean = tl.sum(b_grad * (b_scores / b_total[:, None]), axis=1)
                b_grad = (b_grad - b_mean[:, None]) / b_total[:, None]
            b_values = b_grad * b_scores * (1.0 - b_scores)
    b_out = tl.zeros([TOKENS, BLOCK], tl.float32)
    for choice in range(CHOICES):
        m_choice = (o_choice == choice)[None, :]
        b_expert = tl.sum(tl.where(m_choice, b_experts, 0), axis=1)  # [TOKENS]
        b_value = tl.sum(tl.where(m_choice, b_values, 0.0), axis=1)
        b_out = tl.where(o_expert[None, :] == b_expert[:, None], b_value[:, None], b_out)
    if SOFTMAX and not NORMALIZE:
        b_scores = softmax_rows(b_logits)
        b_scored = tl.where(b_out == 0.0, 0.0, b_scores * b_out)
        b_any = tl.max(b_experts, axis=1) >= 0
        b_out = tl.where(b_any[:, None], b_scores * (b_out - tl.sum(b_scored, axis=1)[:, None]), 0.0)
    tl.store(p_dlogits + o_tile, b_out.to(p_dlogits.dtype.element_ty), mask=m_tile)


def _constants(call: MoeRouteCall, config: Config) -> dict[str, Any]:
    batch, tokens, experts = call.logits.shape
    return {
        "grid": -(-batch * tokens // config.tokens),
        "EXPERTS": experts,
        "BLOCK": next_power_of_2(experts),
        "CHOICES": call.k,
        "CHOICE_BLOCK": next_power_of_2(call.k),
        "TOKENS": config.tokens,
        "SOFTMAX": call.scoring == "softmax",
        "NORMALIZE": call.normalize,
        "SCALE": call.scale,
        "num_warps": config.num_warps,
    }


def forward(call: MoeRouteCall, inputs: MoeRouteInputs, config: Config) -> MoeRouteOutputs:
    logits, bias = inputs
    batch, tokens, _ = logits.shape
    shape = (batch, tokens, call.k)
    if not logits.size:
        return MoeRouteOutputs(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))
    weights, experts = call_kernel(
        moe_route_forward_kernel,
        (logits, logits if bias is None else bias, batch * tokens, tokens),
        ((shape, jnp.float32), (shape, jnp.int32)),
        GROUPS=call.num_groups,
        TOP_GROUPS=call.top_groups,
        HAS_BIAS=bias is not None,
        SHARED_BIAS=bias is None or bias.shape[0] == 1,
        **_constants(call, config),
    )
    return MoeRouteOutputs(weights, experts)


def backward(
    call: MoeRouteCall, inputs: MoeRouteInputs, outputs: MoeRouteOutputs, cotangents: MoeRouteOutputs, config: Config
) -> MoeRouteInputs:
    logits = inputs.logits
    if not logits.size:
        return MoeRouteInputs(jnp.zeros_like(logits))
    (d_logits,) = call_kernel(
        moe_route_backward_kernel,
        (logits, outputs.experts, cotangents.weights, logits.shape[0] * logits.shape[1]),
        ((logits.shape, logits.dtype),),
        **_constants(call, config),
    )
    return MoeRouteInputs(d_logits)

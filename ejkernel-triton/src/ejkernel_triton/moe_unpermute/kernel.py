"""Each program sums the rows of one token. In the gradient it reads them once more, for the weights' dot products, beside writing
theirs."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.moe_unpermute.interface import MoeUnpermuteCall, MoeUnpermuteInputs, MoeUnpermuteOutputs
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._copies.config import Config
from ejkernel_triton._copies.kernel import collect, constants_of, spread
from ejkernel_triton._jax_triton import call_kernel


@triton.jit
def moe_unpermute_backward_kernel(
    p_rows,
    p_positions,
    p_weights,
    p_grad,
    tokens,
    p_drows,
    p_dweights,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    SHARED_POSITIONS: tl.constexpr,
    SHARED_WEIGHTS: tl.constexpr,
):
    i_token = tl.program_id(0)  # of the whole batch
    o_member = (i_token // tokens).to(tl.int64) * tokens * CHOICES * WIDTH
    o_choice = tl.arange(0, CHOICE_BLOCK)  # [CHOICE_BLOCK]
    m_choice = o_choice < CHOICES
    o_positions = (i_token % tokens if SHARED_POSITIONS else i_token).to(tl.int64) * CHOICES + o_choice
    o_weights = (i_token % tokens if SHARED_WEIGHTS else i_token).to(tl.int64) * CHOICES + o_choice
    i_row = tl.load(p_positions + o_positions, mask=m_choice, other=0)  # [CHOICE_BLOCK]
    m_taken = m_choice & (i_row >= 0)
    i_row = tl.where(i_row >= 0, i_row, -1 - i_row)
    m_row = m_choice & (i_row < tokens * CHOICES)
    b_weights = tl.load(p_weights + o_weights, mask=m_taken, other=0.0).to(tl.float32)  # [CHOICE_BLOCK]
    o_row = o_member + i_row.to(tl.int64) * WIDTH
    b_products = tl.zeros([CHOICE_BLOCK, BLOCK], tl.float32)
    for i_column in range(0, WIDTH, BLOCK):
        o_channel = i_column + tl.arange(0, BLOCK)  # [BLOCK]
        m_channel = o_channel < WIDTH
        o_grad = i_token.to(tl.int64) * WIDTH + o_channel
        b_grad = tl.load(p_grad + o_grad, mask=m_channel, other=0.0).to(tl.float32)  # [BLOCK]
        o_tile = o_row[:, None] + o_channel[None, :]
        m_tile = (m_taken & m_row)[:, None] & m_channel[None, :]
        b_rows = tl.load(p_rows + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [CHOICE_BLOCK, BLOCK]
        b_drows = tl.where(m_taken[:, None], b_weights[:, None] * b_grad[None, :], 0.0)
        tl.store(p_drows + o_tile, b_drows.to(p_drows.dtype.element_ty), mask=m_row[:, None] & m_channel[None, :])
        b_products += tl.where(m_tile, b_rows * b_grad[None, :], 0.0)
    tl.store(p_dweights + i_token.to(tl.int64) * CHOICES + o_choice, tl.sum(b_products, axis=1), mask=m_choice)


def forward(call: MoeUnpermuteCall, inputs: MoeUnpermuteInputs, config: Config) -> MoeUnpermuteOutputs:
    return MoeUnpermuteOutputs(collect(inputs.rows, inputs.positions, inputs.weights, config))


def backward(
    call: MoeUnpermuteCall,
    inputs: MoeUnpermuteInputs,
    outputs: MoeUnpermuteOutputs,
    cotangents: MoeUnpermuteOutputs,
    config: Config,
) -> MoeUnpermuteInputs:
    rows, positions, weights = inputs
    if weights is None:
        return MoeUnpermuteInputs(spread(cotangents.out, positions, None, config), None)
    if not rows.size:
        return MoeUnpermuteInputs(jnp.zeros_like(rows), None, jnp.zeros_like(weights))
    (batch, _, width), (_, tokens, choices) = rows.shape, positions.shape
    d_rows, d_weights = call_kernel(
        moe_unpermute_backward_kernel,
        (rows, positions, weights, cotangents.out, tokens),
        ((rows.shape, rows.dtype), ((batch, tokens, choices), jnp.float32)),
        grid=batch * tokens,
        WIDTH=width,
        BLOCK=config.block,
        CHOICE_BLOCK=next_power_of_2(choices),
        num_warps=config.num_warps,
        **constants_of(positions, weights, batch),
    )
    if weights.shape[0] < batch:
        d_weights = jnp.sum(d_weights, axis=0, keepdims=True)
    return MoeUnpermuteInputs(d_rows, None, d_weights.astype(weights.dtype))

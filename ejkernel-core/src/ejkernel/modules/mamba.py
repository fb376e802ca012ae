"""Mamba-3: a state-space model with the exponential-trapezoidal rule and a state that turns as complex numbers do."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.modules._class_api import class_api
from ejkernel.operations.common.options import as_flag
from ejkernel.operations.common.packed import check_bounds
from ejkernel.operations.linear_recurrence.interface import OPERATION as _LINEAR_RECURRENCE
from ejkernel.operations.linear_recurrence.trapezoidal import check_state_parts, trapezoidal
from ejkernel.utils.checks import check_given

__all__ = ["Mamba3", "mamba3"]


@public()
def mamba3(
    x: t.HeadChannels,
    A: t.HeadRates,
    B: t.GroupInputs,
    C: t.GroupInputs,
    D: t.HeadSkip | None,
    dt: t.SequencePerHead,
    trap: t.SequencePerHead,
    angles: t.PairAngles,
    *,
    B_bias: t.HeadInputBias | None = None,
    C_bias: t.HeadInputBias | None = None,
    initial_state: t.TrapezoidalState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    dt_bias: t.Heads | None = None,
    dt_softplus: t.Flag = False,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.HeadChannelsOutput, t.NewTrapezoidalState]:
    """Mamba-3: `S_t = a_t (S_(t-1) + b_t K_(t-1) x_(t-1)^T) + c_t K_t x_t^T`, `y_t = S_t^T Q_t + D x_t`; single input and output.

    `a = exp(A dt)`, `c = sigmoid(trap) dt` and `b = (1 - sigmoid(trap)) dt`. K and Q are `B + B_bias` and `C + C_bias`, whose
    channels 2i and 2i + 1 are turned by `theta_t = theta_(t-1) + pi tanh(angles_t) dt_t`, radians, for i below R. The norms of
    B and C, the gate and the norm of y are the caller's.

    Args:
        x: `[B,T,H,P]`, float32, bfloat16 or float16; any length.
        A: `[B,T,H]`, as the model projects it, or `[H]`; already negative. -inf forgets, but for tokens with dt = 0.
        B: `[B,T,G,N]`, N even; G divides H, and H / G consecutive heads share a group.
        C: `[B,T,G,N]`.
        D: `[H]` or `[H,P]`, or None (no skip connection).
        dt: step sizes `[B,T,H]`, positive; as the model projects them with dt_bias and dt_softplus.
        trap: `[B,T,H]`, logit of a token's own share; inf is the rule of Mamba-2.
        angles: `[B,T,M,R]`, before tanh; M divides H, 1 for angles that all heads share, and R is at most N / 2.
        B_bias: `[H,N]`; None = 0.
        C_bias: `[H,N]`; None = 0.
        initial_state: theta `[B,H,R]`, S `[B,H,N,P]`, and K `[B,H,N]` and x `[B,H,P]` of the last token; `[n,H,...]` with
            cu_seqlens of n sequences; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers, B = 1; as for `state_space_v1`.
        dt_bias: `[H]`, added to dt in float32; None = 0.
        dt_softplus: dt becomes `log(1 + exp(dt))`, after the bias.
        precision: of the products; None = full precision of the dtype.
        cfg: config override for the chosen implementation of `linear_recurrence`.

    Returns:
        y `[B,T,H,P]` in the dtype of x, and the last state, float32, like initial_state, with theta from 0 to 2 pi.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Mamba-3: Improved Sequence Modeling using State Space Principles, 2026.
    """
    arrays, options, run = split(locals(), "x A B C D dt trap angles B_bias C_bias initial_state cu_seqlens dt_bias")
    check_given(x=x, A=A, B=B, C=C, dt=dt, trap=trap, angles=angles)
    check_state_parts(initial_state)
    check_bounds(cu_seqlens, "x", x)
    options["dt_softplus"] = as_flag("dt_softplus", dt_softplus)
    return _LINEAR_RECURRENCE.invoke(arrays, options, form=trapezoidal, **run)


Mamba3 = class_api("Mamba3", mamba3)

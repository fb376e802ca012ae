"""State-space models and RWKV-4: recurrences that carry a state from token to token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

from ejkernel import typing as t
from ejkernel._pipeline.arguments import pick, public, split
from ejkernel.errors import argument_names, invalid
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import DispatchOptions
from ejkernel.modules.norms import Activation, activation, gated_rms_norm
from ejkernel.operations.common.options import as_flag
from ejkernel.operations.common.packed import check_bounds, taking_part, zero_outside
from ejkernel.operations.linear_recurrence.interface import OPERATION as _LINEAR_RECURRENCE
from ejkernel.operations.linear_recurrence.state_space import state_space
from ejkernel.operations.rwkv4.interface import OPERATION as _RWKV4
from ejkernel.operations.selective_scan.forms import scan
from ejkernel.operations.selective_scan.interface import OPERATION as _SELECTIVE_SCAN
from ejkernel.utils.checks import check_compute, check_shape, finite_number

__all__ = ["RWKV4", "StateSpaceV1", "StateSpaceV2", "rwkv4", "state_space_v1", "state_space_v2"]


@public()
@argument_names(x="hidden_states")
def state_space_v1(
    hidden_states: t.SequenceChannels,
    A: t.ScanMatrix,
    B: t.ScanInputs,
    C: t.ScanInputs,
    D: t.Channels | None,
    dt: t.SequenceChannels,
    gate: t.SequenceChannels | None = None,
    initial_state: t.ScanState | None = None,
    conv_state: t.AnyShape | None = None,
    *,
    act_fn: Activation | None = None,
    dt_bias: t.Channels | None = None,
    dt_softplus: t.Flag = False,
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SequenceChannelsOutput, t.NewScanState, t.AnyShape | None]:
    """Mamba's selective scan: `h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t`, `y_t = C_t . h_t + D x_t`, times `act_fn(gate_t)`.

    Args:
        hidden_states: x, `[B,T,I]`, float32, bfloat16 or float16; any length.
        A: `[I,N]`, already negative (`-exp(A_log)`); -inf forgets, but for tokens with dt = 0.
        B: `[B,T,N]`.
        C: `[B,T,N]`.
        D: `[I]`, or None (no skip connection).
        dt: step sizes `[B,T,I]`, positive; as the model projects them with dt_bias and dt_softplus.
        gate: `[B,T,I]`, or None (no gate).
        initial_state: the state before the first token `[B,I,N]`, or `[n,I,N]` with cu_seqlens; None = zeros.
        conv_state: handed through, untouched.
        act_fn: applied to the gate; None = silu. Without a gate it is not used.
        dt_bias: `[I]`, added to dt in float32; None = 0.
        dt_softplus: dt becomes `log(1 + exp(dt))`, after the bias.
        seg_ids: integers `[B,T]` or `[1,T]`. The state becomes 0 before a token whose id is not that of the token before it.
            Tokens with an id below 0 are padding: they take no part, whatever they hold, get 0, and do not separate their
            neighbours; the first token that takes part starts from initial_state.
        cu_seqlens: integers `[n + 1]`, not decreasing, from 0 to at most T; may be traced; B = 1. Sequence i is the tokens
            from cu_seqlens[i] to cu_seqlens[i + 1]; tokens after the last one take no part, whatever they hold, and get 0.

    Returns:
        y `[B,T,I]` in the dtype of hidden_states, the last state in float32, shaped like initial_state, and conv_state.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
    """
    arrays = pick(locals(), "x=hidden_states A B C D dt initial_state dt_bias seg_ids cu_seqlens")
    options = {"dt_softplus": as_flag("dt_softplus", dt_softplus)}
    out, state = _SELECTIVE_SCAN.invoke(arrays, options, platform=platform, cfg=cfg, form=scan)
    activated = activation(act_fn)
    if gate is not None:
        used = _used_gate(gate, out, "[B, T, I]", seg_ids, cu_seqlens)
        out = (out * activated(used)).astype(out.dtype)
    return out, state, conv_state


@public()
@argument_names(scale="norm_weight", group_size="norm_group_size", epsilon="rmsnorm_eps")
def state_space_v2(
    x: t.HeadChannels,
    A: t.Heads,
    B: t.GroupInputs,
    C: t.GroupInputs,
    D: t.HeadSkip | None,
    dt: t.SequencePerHead,
    gate: t.HeadGate | None = None,
    initial_state: t.HeadState | None = None,
    conv_state: t.AnyShape | None = None,
    *,
    n_groups: int | None = None,
    act_fn: Activation | None = None,
    use_gated_rmsnorm: t.Flag = False,
    rmsnorm_eps: t.Number = 1e-5,
    norm_before_gate: t.Flag | None = None,
    norm_weight: t.InnerScale | None = None,
    norm_group_size: t.Count | None = None,
    dt_bias: t.Heads | None = None,
    dt_softplus: t.Flag = False,
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.HeadOutput, t.NewHeadState, t.AnyShape | None]:
    """Mamba-2 (SSD): `h_t = exp(A dt_t) h_(t-1) + dt_t x_t B_t^T`, `y_t = h_t C_t + D x_t`, one decay per head and token.

    With a gate, `y act_fn(gate)`; with use_gated_rmsnorm, `gated_rms_norm(y, gate, norm_weight)`.

    Args:
        x: `[B,T,H,P]`, float32, bfloat16 or float16; any length.
        A: `[H]`, already negative (`-exp(A_log)`); -inf forgets, but for tokens with dt = 0.
        B: `[B,T,G,N]`; G divides H, and H / G consecutive heads share a group. Groups are never repeated in memory.
        C: `[B,T,G,N]`.
        D: `[H]` or `[H,P]`, or None (no skip connection).
        dt: step sizes `[B,T,H]`, positive; as the model projects them with dt_bias and dt_softplus.
        gate: `[B,T,H*P]`, or None (no gate).
        initial_state: the state before the first token `[B,H,P,N]`, or `[n,H,P,N]` with cu_seqlens; None = zeros.
        conv_state: handed through, untouched.
        n_groups: G; None = as B says.
        act_fn: applied to the gate; None = silu. Without a gate it is not used.
        use_gated_rmsnorm: norm with the gate, in float32.
        rmsnorm_eps: of that norm.
        norm_before_gate: its order: y is normed, then gated; False: gated, then normed, as in Mamba-2 and most models with its
            layer. None, for a norm without weight and groups alone: True.
        norm_weight: `[H*P]`, of that norm; None = ones.
        norm_group_size: channels that share a mean square (`H*P / n_groups` in Mamba-2); None = H*P, one group.
        dt_bias: `[H]`, added to dt in float32; None = 0.
        dt_softplus: dt becomes `log(1 + exp(dt))`, after the bias.
        seg_ids, cu_seqlens: where sequences end, as for `state_space_v1`.
        precision: of the products; None = full precision of the dtype.
        cfg: config override for the chosen implementation of the recurrence.

    Returns:
        y `[B,T,H*P]` in the dtype of x, the last state in float32, shaped like initial_state, and conv_state.

    Raises:
        ValueError: a shape does not fit, use_gated_rmsnorm without a gate, or a weight or groups of the norm without its order.

    Source: Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
        Duality, 2024.
    """
    arrays = pick(locals(), "x A B C D dt initial_state dt_bias seg_ids cu_seqlens")
    with_norm = as_flag("use_gated_rmsnorm", use_gated_rmsnorm)
    if with_norm and gate is None:
        raise invalid("use_gated_rmsnorm", True, "a gate with it", remedy="pass gate=, or normalise with rms_norm")
    norm = {"scale": norm_weight, "group_size": norm_group_size, "norm_before_gate": norm_before_gate}
    order = _norm_order(norm, with_norm)
    finite_number("rmsnorm_eps", rmsnorm_eps, at_least=0)
    check_bounds(cu_seqlens, "x", x)
    options = {"n_groups": n_groups, "precision": precision, "dt_softplus": as_flag("dt_softplus", dt_softplus)}
    out, state = _LINEAR_RECURRENCE.invoke(arrays, options, platform=platform, cfg=cfg, form=state_space)
    activated = activation(act_fn)
    if gate is None:
        return out, state, conv_state
    used = _used_gate(gate, out, "[B, T, H * P]", seg_ids, cu_seqlens)
    if not with_norm:
        return (out * activated(used)).astype(out.dtype), state, conv_state
    settings: dict[str, Any] = {**norm, "norm_before_gate": order, "epsilon": rmsnorm_eps, "act_fn": act_fn}
    return gated_rms_norm(out, used, **settings), state, conv_state


def _norm_order(norm: Mapping[str, Any], with_norm: bool) -> bool:
    """norm_before_gate, which a norm with weight or groups has to say: models differ."""
    given = [name for name, value in norm.items() if value is not None]
    if given and not with_norm:
        raise invalid(given[0], "a value", "None without use_gated_rmsnorm", remedy="pass use_gated_rmsnorm=True")
    if norm["norm_before_gate"] is not None:
        return as_flag("norm_before_gate", norm["norm_before_gate"])
    if given:
        raise invalid("norm_before_gate", None, "True or False beside a weight or groups", remedy="Mamba-2's models have False")
    return True


def _used_gate(gate: Any, out: Any, meaning: str, seg_ids: Any, cu_seqlens: Any) -> Any:
    """The gate, 0 at tokens that take no part: out is 0 there, and 0 * NaN would not be."""
    check_compute("gate", gate)
    check_shape("gate", gate, out.shape, meaning)
    part = taking_part(seg_ids, cu_seqlens, out, "x")
    return gate if part is None else zero_outside(part, gate)[0]


@overload
def rwkv4(
    w: t.Channels,
    u: t.Channels,
    k: t.SequenceChannels,
    v: t.SequenceChannels,
    *,
    state: t.MixingState | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[DispatchOptions],
) -> t.SequenceChannelsOutput: ...


@overload
def rwkv4(
    w: t.Channels,
    u: t.Channels,
    k: t.SequenceChannels,
    v: t.SequenceChannels,
    *,
    state: t.MixingState | None = None,
    return_state: Literal[True],
    **options: Unpack[DispatchOptions],
) -> tuple[t.SequenceChannelsOutput, t.NewMixingState]: ...


@overload
def rwkv4(
    w: t.Channels,
    u: t.Channels,
    k: t.SequenceChannels,
    v: t.SequenceChannels,
    *,
    state: t.MixingState | None = None,
    return_state: t.Flag,
    **options: Unpack[DispatchOptions],
) -> t.SequenceChannelsOutput | tuple[t.SequenceChannelsOutput, t.NewMixingState]: ...


@public("state")
def rwkv4(
    w: t.Channels,
    u: t.Channels,
    k: t.SequenceChannels,
    v: t.SequenceChannels,
    *,
    state: t.MixingState | None = None,
    return_state: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SequenceChannelsOutput | tuple[t.SequenceChannelsOutput, t.NewMixingState]:
    """RWKV-4's time mixing: the mean of all values so far, v_s weighted by `exp(k_s - (t - 1 - s) exp(w))`, v_t by `exp(u + k_t)`.

    Numerator and denominator are kept relative to a running maximum of the exponents, so no key overflows.

    Args:
        w: `[C]`: the decay per token is `exp(-exp(w))`, w as the model stores it.
        u: bonus of the token itself `[C]`.
        k: `[B,T,C]`, float32, bfloat16 or float16; any length.
        v: `[B,T,C]`.
        state: `[B,3,C]`: numerator and denominator, both divided by `exp` of the third, the exponent; None = nothing seen, which
            is `(0, 0, -1e30)`.
        return_state: also return the last state.

    Returns:
        `[B,T,C]` in the dtype of v; with return_state a tuple with the last state `[B,3,C]` in float32.

    Source: Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023.
    """
    arrays, options, run = split(locals(), "w u k v state")
    return _RWKV4.invoke(arrays, options, **run)


StateSpaceV1 = class_api("StateSpaceV1", state_space_v1)
StateSpaceV2 = class_api("StateSpaceV2", state_space_v2)
RWKV4 = class_api("RWKV4", rwkv4)

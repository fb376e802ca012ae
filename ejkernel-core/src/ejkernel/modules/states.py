"""State-space models and RWKV-4: recurrences that carry a state from token to token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel.call.records import Bound
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.modules._class_api import class_form
from ejkernel.modules._options import DispatchOptions
from ejkernel.operations.flash_attention.bind import as_flag
from ejkernel.operations.linear_recurrence.interface import OPERATION as _LINEAR_RECURRENCE
from ejkernel.operations.rwkv4.interface import OPERATION as _RWKV4
from ejkernel.operations.selective_scan.interface import OPERATION as _SELECTIVE_SCAN
from ejkernel.utils.checks import check_compute, check_shape, finite_number
from ejkernel.utils.dtypes import accumulator

Activation = Callable[[jax.Array], jax.Array]


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
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SequenceChannelsOutput, t.NewScanState, t.AnyShape | None]:
    """Mamba's selective scan: `h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t`, `y_t = C_t . h_t + D x_t`, times `act_fn(gate_t)`.

    Args:
        hidden_states: x, `[B,T,I]`, float32, bfloat16 or float16; any length.
        A: `[I,N]`, already negative (`-exp(A_log)`) and finite.
        B: `[B,T,N]`.
        C: `[B,T,N]`.
        D: `[I]`, or None (no skip connection).
        dt: step sizes `[B,T,I]`, after softplus.
        gate: `[B,T,I]`, or None (no gate).
        initial_state: the state before the first token `[B,I,N]`; None = zeros.
        conv_state: handed through, untouched.
        act_fn: applied to the gate; None = silu. Without a gate it is not used.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        y `[B,T,I]` in the dtype of hidden_states, the last state `[B,I,N]` in float32, and conv_state.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
    """
    arrays = {"x": hidden_states, "A": A, "B": B, "C": C, "D": D, "dt": dt, "initial_state": initial_state}
    out, state = _SELECTIVE_SCAN.invoke(arrays, {}, platform=platform, cfg=cfg)
    activation = _activation(act_fn)
    if gate is not None:
        check_compute("gate", gate)
        check_shape("gate", gate, out.shape, "[B, T, I]")
        out = (out * activation(gate)).astype(out.dtype)
    return out, state, conv_state


def state_space_v2(
    x: t.HeadChannels,
    A: t.Heads,
    B: t.GroupInputs,
    C: t.GroupInputs,
    D: t.Heads | None,
    dt: t.SequencePerHead,
    gate: t.HeadGate | None = None,
    initial_state: t.HeadState | None = None,
    conv_state: t.AnyShape | None = None,
    *,
    n_groups: int | None = None,
    act_fn: Activation | None = None,
    use_gated_rmsnorm: t.Flag = False,
    rmsnorm_eps: t.Number = 1e-5,
    precision: t.PrecisionLike | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.HeadOutput, t.NewHeadState, t.AnyShape | None]:
    """Mamba-2 (SSD): `h_t = exp(A dt_t) h_(t-1) + dt_t x_t B_t^T`, `y_t = h_t C_t + D x_t`, one decay per head and token.

    With a gate, `y act_fn(gate)`; with use_gated_rmsnorm, `y / sqrt(mean(y^2) + rmsnorm_eps) act_fn(gate)`, the mean over all H*P.

    Args:
        x: `[B,T,H,P]`, float32, bfloat16 or float16; any length.
        A: `[H]`, already negative (`-exp(A_log)`) and finite.
        B: `[B,T,G,N]`; G divides H, and H / G consecutive heads share a group. Groups are never repeated in memory.
        C: `[B,T,G,N]`.
        D: `[H]`, or None (no skip connection).
        dt: step sizes `[B,T,H]`, after softplus.
        gate: `[B,T,H*P]`, or None (no gate).
        initial_state: the state before the first token `[B,H,P,N]`; None = zeros.
        conv_state: handed through, untouched.
        n_groups: G; None = as B says.
        act_fn: applied to the gate; None = silu. Without a gate it is not used.
        use_gated_rmsnorm: normalise before the gate, in float32.
        rmsnorm_eps: of that norm.
        precision: of the products; None = full precision of the dtype.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        y `[B,T,H*P]` in the dtype of x, the last state `[B,H,P,N]` in float32, and conv_state.

    Raises:
        ValueError: a shape does not fit, or use_gated_rmsnorm without a gate.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
        Duality, 2024.
    """
    if as_flag("use_gated_rmsnorm", use_gated_rmsnorm) and gate is None:
        raise invalid("use_gated_rmsnorm", True, "a gate with it", remedy="pass gate=, or normalise with rms_norm")
    arrays = {"x": x, "A": A, "B": B, "C": C, "D": D, "dt": dt, "initial_state": initial_state}
    options = {"n_groups": n_groups, "precision": precision}
    out, state = _LINEAR_RECURRENCE.invoke(arrays, options, platform=platform, cfg=cfg, form=_ssd)
    activation = _activation(act_fn)
    if gate is None:
        return out, state, conv_state
    check_compute("gate", gate)
    check_shape("gate", gate, out.shape, "[B, T, H * P]")
    if not use_gated_rmsnorm:
        return (out * activation(gate)).astype(out.dtype), state, conv_state
    epsilon = finite_number("rmsnorm_eps", rmsnorm_eps, at_least=0)
    wide = out.astype(accumulator(out.dtype))
    normalised = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (normalised * activation(gate.astype(wide.dtype))).astype(out.dtype), state, conv_state


def _activation(act_fn: Any) -> Callable[[Any], Any]:
    if act_fn is not None and not callable(act_fn):
        raise wrong_type("act_fn", repr(act_fn), "a function of an array, or None")
    return act_fn or jax.nn.silu


def _ssd(*, x: Any, A: Any, B: Any, C: Any, D: Any, dt: Any, initial_state: Any, n_groups: int | None, precision: Any) -> Bound:
    """Mamba-2 as a linear recurrence: query C, key B, value dt x, log decay A dt."""
    check_compute("x", x, ndim=4)
    batch, length, heads, channels = x.shape
    if n_groups is not None and (isinstance(n_groups, bool) or not isinstance(n_groups, int)):
        raise wrong_type("n_groups", repr(n_groups), "an int or None")
    for name, array in (("B", B), ("C", C)):
        check_compute(name, array, ndim=4)
        if n_groups is not None and array.shape[2] != n_groups:
            raise invalid(name, f"{array.shape[2]} groups", f"n_groups = {n_groups}")
    groups, width = B.shape[2:]
    for name, array in (("B", B), ("C", C)):
        check_shape(name, array, (batch, length, groups, width), "[B, T, G, N] as x and B")
    if groups == 0 or heads % groups:
        raise invalid("B", f"{groups} groups", f"a divisor of the {heads} heads of x")
    per_head: dict[str, tuple[Any, tuple[int, ...], str]] = {
        "A": (A, (heads,), "[H]"),
        "dt": (dt, (batch, length, heads), "[B, T, H]"),
    }
    if D is not None:
        per_head["D"] = (D, (heads,), "[H]")
    if initial_state is not None:
        per_head["initial_state"] = (initial_state, (batch, heads, channels, width), "[B, H, P, N]")
    for name, (array, shape, meaning) in per_head.items():
        check_compute(name, array)
        check_shape(name, array, shape, meaning)
    wide = accumulator(x.dtype)
    steps = dt.astype(wide)
    bound = _LINEAR_RECURRENCE.canonicalise(
        C,
        B,
        (x.astype(wide) * steps[..., None]).astype(x.dtype),
        steps * A.astype(wide)[None, None],
        initial_state=None if initial_state is None else jnp.swapaxes(initial_state, 2, 3),
        scale=1.0,
        return_state=True,
        precision=precision,
    )

    def finish(outputs: Any) -> Any:
        out, state = bound.finish(outputs)
        if D is not None:
            out = (out.astype(wide) + x.astype(wide) * D.astype(wide)[None, None, :, None]).astype(x.dtype)
        return out.reshape(batch, length, heads * channels), jnp.swapaxes(state, 2, 3)

    return Bound(bound.call, bound.inputs, finish)


@overload
def rwkv4(
    w: t.Channels,
    u: t.Channels,
    k: t.SequenceChannels,
    v: t.SequenceChannels,
    state: t.MixingState | None = None,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[DispatchOptions],
) -> t.SequenceChannelsOutput: ...


@overload
def rwkv4(
    w: t.Channels,
    u: t.Channels,
    k: t.SequenceChannels,
    v: t.SequenceChannels,
    state: t.MixingState | None = None,
    *,
    return_state: Literal[True],
    **options: Unpack[DispatchOptions],
) -> tuple[t.SequenceChannelsOutput, t.NewMixingState]: ...


@overload
def rwkv4(
    w: t.Channels,
    u: t.Channels,
    k: t.SequenceChannels,
    v: t.SequenceChannels,
    state: t.MixingState | None = None,
    *,
    return_state: t.Flag,
    **options: Unpack[DispatchOptions],
) -> t.SequenceChannelsOutput | tuple[t.SequenceChannelsOutput, t.NewMixingState]: ...


def rwkv4(
    w: t.Channels,
    u: t.Channels,
    k: t.SequenceChannels,
    v: t.SequenceChannels,
    state: t.MixingState | None = None,
    *,
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
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        `[B,T,C]` in the dtype of v; with return_state a tuple with the last state `[B,3,C]` in float32.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
        NoKernelError: no admitted platform supports the call.

    Source: Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023.
    """
    arrays = {"w": w, "u": u, "k": k, "v": v, "state": state}
    return _RWKV4.invoke(arrays, {"return_state": return_state}, platform=platform, cfg=cfg)


StateSpaceV1 = class_form("StateSpaceV1", state_space_v1)
StateSpaceV2 = class_form("StateSpaceV2", state_space_v2)
RWKV4 = class_form("RWKV4", rwkv4)

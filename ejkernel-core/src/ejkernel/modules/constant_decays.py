"""Linear attention whose decays are constants: of the layer, or of the head."""

from __future__ import annotations

from typing import Any, Literal, Required, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.compositions.frameworks import refuses_masks
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.modules._options import ShardedRecurrenceOptions
from ejkernel.operations.linear_recurrence.forms import dims_of, recurrence
from ejkernel.operations.linear_recurrence.slopes import layer_slopes
from ejkernel.utils.tracing import is_traced, refuse_traced, traced_count

__all__ = ["LightningAttention", "Retention", "lightning_attention", "lightning_attn", "retention"]


class LightningOptions(ShardedRecurrenceOptions, total=False):
    """Of `lightning_attention`."""

    layer_idx: Required[t.TracedCount]
    num_layers: Required[int | np.integer]
    slopes: t.LayerSlopes


@overload
def lightning_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[LightningOptions],
) -> t.SequenceOutput: ...


@overload
def lightning_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[True],
    **options: Unpack[LightningOptions],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def lightning_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: t.Flag,
    **options: Unpack[LightningOptions],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public("initial_state", "cu_seqlens")
def lightning_attention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    layer_idx: t.TracedCount,
    num_layers: int | np.integer,
    slopes: t.LayerSlopes = "linear",
    softmax_scale: t.Scalar | None = None,
    reverse: t.Flag = False,
    return_state: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """Linear attention with a decay per head that the layer sets: `S_t = exp(-s_h) S_(t-1) + k_t v_t^T`, `o_t = scale S_t^T q_t`.

    With heads h, layers l = layer_idx from 0 and L = num_layers, `slopes` names the model whose s_h these are:

    - "linear": `(8 / H) h (1 - l / L)`, of flash-linear-attention; head 0 never forgets;
    - "minimax": `a_h (1 - l / (L - 1) + 1e-5)`, of MiniMax-Text-01 and TransNormerLLM;
    - "bailing": `a_h (1 - (l - 1) / (L - 1) + 1e-5)`, of Ling 2.5 and Ring 2.5;

    where `a_h = 2^(-8 (h + 1) / H)` if H is a power of two, as ALiBi has it for any H; with L = 1 the last factor is 1 + 1e-5.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,K,D]`; K divides H.
        value: `[B,T,K,V]`.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, B = 1; as for `recurrent_attention`.
        layer_idx: index of the layer, from 0 to num_layers - 1; may be traced, as in a `jax.lax.scan` over layers.
        num_layers: how many layers the model has.
        slopes: "linear", "minimax" or "bailing". Other decays: `recurrent_attention` with `g_gamma = -s`.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`. MiniMax's models have none: pass 1.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.
        mesh: a `jax.sharding.Mesh`: run inside `shard_map` over it. Batch and heads may be split, alike in all arrays.
        in_specs: with mesh, one PartitionSpec or None for each of query, key, value, initial_state, cu_seqlens; the decays follow
            the heads of query.
        out_specs: with mesh, a PartitionSpec, or a tuple of two with return_state.

    Returns:
        `[B,T,H,V]`; with return_state a tuple with the last state, float32.

    Raises:
        ValueError: a shape, layer_idx, num_layers or slopes does not fit.

    Source: Qin et al., Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths in Large Language Models, 2024;
        MiniMax-01: Scaling Foundation Models with Lightning Attention, 2025.
    """
    arrays, options, run = split(locals(), _ARRAYS, own="layer_idx num_layers slopes")
    layer: Any = layer_idx
    for name, number in (("layer_idx", 0 if is_traced(layer) else layer), ("num_layers", num_layers)):
        refuse_traced(name, number)
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise wrong_type(name, repr(number), "an int")
    if num_layers < 1:
        raise invalid("num_layers", num_layers, "a value >= 1")
    if is_traced(layer):
        layer = jnp.minimum(traced_count("layer_idx", layer, 0), num_layers - 1).astype(jnp.float32)
    elif not 0 <= layer < num_layers:
        raise invalid("layer_idx", layer_idx, f"a value from 0 to num_layers - 1 = {num_layers - 1}")
    if slopes not in ("linear", "minimax", "bailing"):
        raise invalid("slopes", repr(slopes), "'linear', 'minimax' or 'bailing'", remedy=_OWN_DECAYS)
    gamma = -layer_slopes(slopes, _heads(query), layer, int(num_layers))
    return _with_constant_decay(gamma, arrays, options, **run)


@overload
def retention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[ShardedRecurrenceOptions],
) -> t.SequenceOutput: ...


@overload
def retention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: Literal[True],
    **options: Unpack[ShardedRecurrenceOptions],
) -> tuple[t.SequenceOutput, t.FinalState]: ...


@overload
def retention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    return_state: t.Flag,
    **options: Unpack[ShardedRecurrenceOptions],
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]: ...


@public("initial_state", "cu_seqlens")
@refuses_masks("pack sequences with cu_seqlens, or use flash_attention")
def retention(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    *,
    initial_state: t.MatrixState | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    softmax_scale: t.Scalar | None = None,
    reverse: t.Flag = False,
    return_state: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
    mesh: t.Mesh | None = None,
    in_specs: t.InSpecs | None = None,
    out_specs: t.OutSpecs | None = None,
) -> t.SequenceOutput | tuple[t.SequenceOutput, t.FinalState]:
    """Retention: `S_t = (1 - 2^(-5-h)) S_(t-1) + k_t v_t^T`, `o_t = scale S_t^T q_t` for head h, counted from 0.

    Rotations of query and key, and the norm of the output, are the caller's.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,K,D]`; K divides H.
        value: `[B,T,K,V]`.
        initial_state: `[B,H,D,V]`, or `[n,H,D,V]` with cu_seqlens; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, B = 1; as for `recurrent_attention`.
        softmax_scale: factor of the output; None = `1 / sqrt(D)`.
        reverse: run every sequence from its last token to its first.
        return_state: also return the last state.
        mesh: a `jax.sharding.Mesh`: run inside `shard_map` over it. Batch and heads may be split, alike in all arrays.
        in_specs: with mesh, one PartitionSpec or None for each of query, key, value, initial_state, cu_seqlens; the decays follow
            the heads of query.
        out_specs: with mesh, a PartitionSpec, or a tuple of two with return_state.

    Returns:
        `[B,T,H,V]`; with return_state a tuple with the last state, float32.

    Source: Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, 2023.
    """
    arrays, options, run = split(locals(), _ARRAYS)
    gamma = np.log1p(-(2.0 ** (-5.0 - np.arange(_heads(query)))))
    return _with_constant_decay(gamma, arrays, options, **run)


_ARRAYS = "query key value initial_state cu_seqlens"
_OWN_DECAYS = "recurrent_attention takes any decays as g_gamma"


def _heads(query: Any) -> int:
    """H; what is no `[B,T,H,D]` is refused later, by name."""
    return query.shape[2] if getattr(query, "ndim", 0) == 4 else 1


def _with_constant_decay(gamma: Any, arrays: dict[str, Any], options: dict[str, Any], *, in_specs: Any, **run: Any) -> Any:
    names = tuple(arrays)
    arrays = {**arrays, "g_gamma": jnp.asarray(gamma, jnp.float32)}
    if isinstance(in_specs, (tuple, list)) and not isinstance(in_specs, PartitionSpec) and 0 < len(in_specs) <= len(names):
        heads = (*(in_specs[0] or ()), None, None, None)[2]
        in_specs = (*in_specs, *[None] * (len(names) - len(in_specs)), PartitionSpec(heads))
    return over_mesh(recurrence, arrays, options, in_specs=in_specs, dims=dims_of(arrays["cu_seqlens"], gamma), **run)


@public("softmax_scale", "initial_state", "reverse", "cu_seqlens")
def lightning_attn(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    layer_idx: t.TracedCount,
    num_layers: int | np.integer,
    *,
    softmax_scale: t.Scalar | None = None,
    initial_state: t.MatrixState | None = None,
    reverse: t.Flag = False,
    cu_seqlens: t.CumulativeLengths | None = None,
    slopes: t.LayerSlopes = "linear",
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SequenceOutput, t.FinalState]:
    """`lightning_attention` under its older name and order of arguments; always returns `(out, state)`."""
    return lightning_attention(**locals(), return_state=True)


LightningAttention = class_api("LightningAttention", lightning_attention)
Retention = class_api("Retention", retention)

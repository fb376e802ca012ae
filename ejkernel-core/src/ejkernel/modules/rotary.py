"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public
from ejkernel._pipeline.operation import Operation
from ejkernel.errors import invalid, wrong_type
from ejkernel.modules._class_api import class_form
from ejkernel.operations.common.rotary.interface import check_pairs
from ejkernel.operations.qk_norm_rope.interface import OPERATION as _QK_NORM_ROPE
from ejkernel.operations.rope.interface import OPERATION as _ROPE


@public()
def rope(
    x: t.RotaryHeads,
    cos: t.Angles,
    sin: t.Angles,
    *,
    rotary_dim: t.Count | None = None,
    interleaved: t.Flag = False,
    layout: t.RotaryLayout = "BTHD",
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.RotaryOutput:
    """Rotary position embedding of one array: `x * cos + turn(x) * sin`, where `turn` maps each pair (a, b) to (-b, a).

    Args:
        x: `[B,T,H,D]`, float32, bfloat16 or float16; any length. Or packed tokens `[N,H,D]`, with N for T.
        cos: `[B,T,w]`, `[1,T,w]` or `[T,w]`. w is `rotary_dim`, one number per channel, or `rotary_dim / 2`, one per pair.
        sin: like cos.
        rotary_dim: how many channels, the first ones, are rotated; even. None = D.
        interleaved: pairs are channels (2i, 2i + 1), as in GPT-J, instead of (i, i + rotary_dim / 2), as in Llama. cos and sin
            per channel must then be in that order too.
        layout: "BTHD", or "BHTD" if x is `[B,H,T,D]` or `[H,N,D]`.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        Like x. Computed in float32 inside; cos and sin have gradients too.

    Raises:
        ValueError: a shape or value does not fit, or cos or sin (if concrete) are in the order of the other kind of pairs.
        TypeError: not an array of a floating type.
        NoKernelError: no admitted platform supports the call.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    return _turn(
        _ROPE,
        {"query": x, "key": None, "cos": cos, "sin": sin},
        {"rotary_dim": rotary_dim, "interleaved": interleaved, "layout": layout},
        platform,
        cfg,
    )


@public()
def llama_rope(
    q: t.RotaryHeads,
    k: t.RotaryHeads,
    cos: t.Angles,
    sin: t.Angles,
    *,
    rotary_dim: t.Count | None = None,
    interleaved: t.Flag = False,
    layout: t.RotaryLayout = "BTHD",
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.RotaryOutput, t.RotaryOutput]:
    """Rotary position embedding of queries and keys: `x * cos + turn(x) * sin`, `turn` maps each pair (a, b) to (-b, a).

    Args:
        q: `[B,T,H,D]`, float32, bfloat16 or float16; any length. Or packed tokens `[N,H,D]`, with N for T.
        k: `[B,T,K,D]`, or `[N,K,D]`.
        cos: `[B,T,w]`, `[1,T,w]` or `[T,w]`. w is `rotary_dim`, one number per channel, or `rotary_dim / 2`, one per pair.
        sin: like cos. `LlamaRotaryEmbedding` makes both.
        rotary_dim: how many channels, the first ones, are rotated; even. None = D.
        interleaved: pairs are channels (2i, 2i + 1), as in GPT-J, instead of (i, i + rotary_dim / 2), as in Llama. cos and sin
            per channel must then be in that order too.
        layout: "BTHD", or "BHTD" if q and k are `[B,heads,T,D]` or `[heads,N,D]`.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        q and k, rotated, each in its own dtype. Computed in float32 inside; cos and sin have gradients too.

    Raises:
        ValueError: a shape or value does not fit, or cos or sin (if concrete) are in the order of the other kind of pairs.
        TypeError: not an array of a floating type.
        NoKernelError: no admitted platform supports the call.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    if k is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise wrong_type("k", "None", "an array", remedy="rope(x, cos, sin) rotates one array")
    return _turn(
        _ROPE,
        {"query": q, "key": k, "cos": cos, "sin": sin},
        {"rotary_dim": rotary_dim, "interleaved": interleaved, "layout": layout},
        platform,
        cfg,
    )


@public()
def fused_qk_norm_rope(
    q: t.RotaryHeads,
    k: t.RotaryHeads,
    cos: t.Angles,
    sin: t.Angles,
    q_scale: t.HeadScale | None = None,
    k_scale: t.HeadScale | None = None,
    *,
    epsilon: t.Number = 1e-6,
    scale_offset: t.Number = 0.0,
    rotary_dim: t.Count | None = None,
    interleaved: t.Flag = False,
    layout: t.RotaryLayout = "BTHD",
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.RotaryOutput, t.RotaryOutput]:
    """RMS norm of every head of queries and keys, then their rotary position embedding, as in Qwen3 and Gemma 3.

    `y = x / sqrt(mean(x^2) + epsilon) * (scale + scale_offset)` over the D channels of each head, and then, on the first
    `rotary_dim` of them, `y * cos + turn(y) * sin`, where `turn` maps each pair (a, b) to (-b, a). y is not rounded in between.

    Args:
        q: `[B,T,H,D]`, float32, bfloat16 or float16; any length. Or packed tokens `[N,H,D]`, with N for T.
        k: `[B,T,K,D]`, or `[N,K,D]`.
        cos: `[B,T,w]`, `[1,T,w]` or `[T,w]`. w is `rotary_dim`, one number per channel, or `rotary_dim / 2`, one per pair.
        sin: like cos. `LlamaRotaryEmbedding` makes both.
        q_scale: `[D]`, shared by the heads of q; None means ones.
        k_scale: `[D]`, shared by the heads of k; None means ones.
        epsilon: added to the mean square.
        scale_offset: added to both scales; 1 for checkpoints that store `scale - 1` (Gemma).
        rotary_dim: how many channels, the first ones, are rotated; even. None = D. The norm is over all of them either way.
        interleaved: pairs are channels (2i, 2i + 1), as in GPT-J, instead of (i, i + rotary_dim / 2), as in Llama. cos and sin
            per channel must then be in that order too.
        layout: "BTHD", or "BHTD" if q and k are `[B,heads,T,D]` or `[heads,N,D]`.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        q and k, each in its own dtype. Computed in float32 inside; the scales, cos and sin have gradients too.

    Raises:
        ValueError: a shape or value does not fit, or cos or sin (if concrete) are in the order of the other kind of pairs.
        TypeError: not an array of a floating type.
        NoKernelError: no admitted platform supports the call.

    Source: the kernel of this name in TensorRT-LLM and vLLM, here with cos and sin as arguments and with gradients.
    """
    return _turn(
        _QK_NORM_ROPE,
        {"query": q, "key": k, "cos": cos, "sin": sin, "query_scale": q_scale, "key_scale": k_scale},
        {
            "epsilon": epsilon,
            "scale_offset": scale_offset,
            "rotary_dim": rotary_dim,
            "interleaved": interleaved,
            "layout": layout,
        },
        platform,
        cfg,
    )


def _turn(operation: Operation, arrays: dict[str, Any], options: dict[str, Any], platform: t.Platforms, cfg: Any) -> Any:
    rotary_dim, interleaved = options["rotary_dim"], options["interleaved"]
    if rotary_dim is None:
        rotary_dim = (0, *getattr(arrays["query"], "shape", ()))[-1]
    if isinstance(interleaved, bool) and isinstance(rotary_dim, int):  # else refused by name in a moment
        check_pairs(arrays["cos"], arrays["sin"], rotary_dim, interleaved)
    return operation.invoke(arrays, options, platform=platform, cfg=cfg)


Rope = class_form("Rope", rope)
LlamaRope = class_form("LlamaRope", llama_rope)
FusedQkNormRope = class_form("FusedQkNormRope", fused_qk_norm_rope)


class LlamaRotaryEmbedding:
    """Makes cos and sin for `llama_rope` from positions: pair i turns by `position * base^(-2i / dim)`.

    Angles are products of float32 numbers, as in the models that were trained with them; at position p the angle of the first
    pair is exact up to 2^24, and the others carry a relative error of 1e-7, that is, `p * 1e-7` radians at most.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        *,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        per_pair: bool = False,
    ) -> None:
        """
        Args:
            dim: number of rotated channels; even.
            base: ratio of the slowest to the fastest period, for dim channels.
            scaling: None; `{"rope_type": "linear", "factor": f}`: positions divided by f; or `{"rope_type": "llama3",
                "factor": f, "low_freq_factor": l, "high_freq_factor": h, "original_max_position_embeddings": n}`: periods
                above n / l stretched by f, those below n / h kept, and a blend in between.
            interleaved: repeat each number for neighbouring channels instead of for both halves, as `llama_rope(interleaved=True)`
                reads them.
            per_pair: one number per pair, which fits both kinds of pairs, and is half as much to read.

        Raises:
            ValueError: dim is not even and positive, base is not positive, or scaling is not one of these.
        """
        if not isinstance(dim, int) or dim <= 0 or dim % 2:
            raise invalid("dim", dim, "an even number of channels > 0")
        if base <= 0:
            raise invalid("base", base, "a number > 0")
        for name, flag in (("interleaved", interleaved), ("per_pair", per_pair)):
            if not isinstance(flag, bool):
                raise wrong_type(name, repr(flag), "a bool")
        if interleaved and per_pair:
            raise invalid(
                "per_pair", True, "False with interleaved=True", remedy="one number per pair has no order of channels"
            )
        self.dim, self.interleaved, self.per_pair = dim, interleaved, per_pair
        frequencies = 1.0 / float(base) ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        self.frequencies = _scaled(frequencies, scaling).astype(np.float32)

    def __call__(self, position_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin of positions.

        Args:
            position_ids: integers or floating numbers `[B,T]` or `[T]`; any size, negative ones too.

        Returns:
            cos and sin, float32, `[B,T,dim]` or `[T,dim]`, one number per channel; with per_pair `[B,T,dim / 2]` or `[T,dim / 2]`.

        Raises:
            TypeError: positions are not numbers.
        """
        position_ids = jnp.asarray(position_ids)
        if not jnp.issubdtype(position_ids.dtype, jnp.integer) and not jnp.issubdtype(position_ids.dtype, jnp.floating):
            raise wrong_type("position_ids", f"dtype {position_ids.dtype}", "integers or floating numbers")
        frequencies = self.frequencies.reshape((1,) * position_ids.ndim + (-1,))
        angles = position_ids[..., None].astype(jnp.float32) * frequencies
        if not self.per_pair:
            angles = jnp.repeat(angles, 2, axis=-1) if self.interleaved else jnp.concatenate([angles, angles], axis=-1)
        return jnp.cos(angles), jnp.sin(angles)


def _scaled(frequencies: np.ndarray, scaling: Mapping[str, Any] | None) -> np.ndarray:
    if scaling is None:
        return frequencies
    fields = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    kind = scaling.get("rope_type")
    if kind not in fields:
        raise invalid("scaling", f"rope_type {kind!r}", f"one of {', '.join(fields)}")
    if set(scaling) != {"rope_type", *fields[kind]}:
        raise invalid("scaling", f"fields {', '.join(sorted(scaling))}", f"rope_type, {', '.join(fields[kind])}")
    slow = frequencies / scaling["factor"]
    if kind == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * slow

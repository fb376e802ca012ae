"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel._pipeline.operation import Operation
from ejkernel.errors import argument_names, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.operations.common.rotary.interface import check_pairs
from ejkernel.operations.qk_norm_rope.interface import OPERATION as _QK_NORM_ROPE
from ejkernel.operations.rope.interface import OPERATION as _ROPE

__all__ = ["FusedQkNormRope", "LlamaRope", "Rope", "fused_qk_norm_rope", "llama_rope", "rope"]


@public()
@argument_names(query="x")
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

    Returns:
        Like x. Computed in float32 inside; cos and sin have gradients too.

    Raises:
        ValueError: a shape or value does not fit, or cos or sin (if concrete) are in the order of the other kind of pairs.
        TypeError: not an array of a floating type.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    arrays, options, run = split(locals(), "query=x cos sin")
    return _turn(_ROPE, {**arrays, "key": None}, options, run)


@public()
@argument_names(query="q", key="k")
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

    Returns:
        q and k, rotated, each in its own dtype. Computed in float32 inside; cos and sin have gradients too.

    Raises:
        ValueError: a shape or value does not fit, or cos or sin (if concrete) are in the order of the other kind of pairs.
        TypeError: not an array of a floating type.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    arrays, options, run = split(locals(), "query=q key=k cos sin")
    if k is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise wrong_type("k", "None", "an array", remedy="rope(x, cos, sin) rotates one array")
    return _turn(_ROPE, arrays, options, run)


@public()
@argument_names(query="q", key="k", query_scale="q_scale", key_scale="k_scale")
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

    Returns:
        q and k, each in its own dtype. Computed in float32 inside; the scales, cos and sin have gradients too.

    Raises:
        ValueError: a shape or value does not fit, or cos or sin (if concrete) are in the order of the other kind of pairs.
        TypeError: not an array of a floating type.

    Source: the kernel of this name in TensorRT-LLM and vLLM, here with cos and sin as arguments and with gradients.
    """
    return _turn(_QK_NORM_ROPE, *split(locals(), "query=q key=k cos sin query_scale=q_scale key_scale=k_scale"))


def _turn(operation: Operation, arrays: dict[str, Any], options: dict[str, Any], run: dict[str, Any]) -> Any:
    rotary_dim, interleaved = options["rotary_dim"], options["interleaved"]
    if rotary_dim is None:
        rotary_dim = (0, *getattr(arrays["query"], "shape", ()))[-1]
    if isinstance(interleaved, bool) and isinstance(rotary_dim, int):  # else refused by name in a moment
        check_pairs(arrays["cos"], arrays["sin"], rotary_dim, interleaved)
    return operation.invoke(arrays, options, **run)


Rope = class_api("Rope", rope)
LlamaRope = class_api("LlamaRope", llama_rope)
FusedQkNormRope = class_api("FusedQkNormRope", fused_qk_norm_rope)

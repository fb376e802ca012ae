"""cuDNN's attention as XLA takes it: one custom call for each phase, reached through `jax.ffi`.

XLA's GPU compiler replaces calls of these names by a cuDNN graph, which it builds and loads while it compiles a program. The calls
are the ones that `jax.nn.dot_product_attention(implementation="cudnn")` emits (`jax/_src/cudnn/fused_attention_stablehlo.py` of jax
0.10.2, 0.11.2 and 0.12.0.1); a test compares them character by character. That function itself needs a GPU and cuDNN while it is
traced, and neither returns nor takes residuals of another backward phase. This module needs no private module of jax and no device.

Semantics (NVIDIA's documentation of scaled dot product attention, and jax's of `sliding_window_length`): the logit of query i and
key j is `scale * q_i . k_j`; with a causal mask i sees j <= i, both counted from their first, and with a window w also j > i - w
only. Statistics are the natural logarithm of the sum of exponentials, in float32. Head h of H queries reads key head h // (H // K).
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FORWARD = "__cudnn$fmhaSoftmax"
BACKWARD = "__cudnn$fmhaSoftmaxBackward"

_ELEMENT = {"bfloat16": "BF16", "float16": "F16"}
Result = tuple[tuple[int, ...], Any, tuple[int, ...]]
"""Shape, dtype, and axes from major to minor in memory."""
_HEADS_INSIDE = (0, 2, 1, 3)
"""Of a result of shape `[B, H, T, D]` that lies in memory as `[B, T, H, D]`."""


class MaskParams(NamedTuple):
    """The softmax scale, whether the causal mask applies, and the sliding window (None: unlimited)."""

    scale: float
    causal: bool
    window: int | None


def attend(query: Any, key: Any, value: Any, params: MaskParams, *, statistics: bool) -> tuple[Any, Any]:
    """The output `[B, T, H, D]` of `query [B, T, H, D]`, `key` and `value [B, S, K, D]`, and with `statistics` the log-sum-exp
    float32 `[B, H, T]`, else None."""
    batch, queries, heads, size = query.shape
    results: list[Result] = [((batch, heads, queries, size), query.dtype, _HEADS_INSIDE)]
    if statistics:
        results.append(((batch, heads, queries), jnp.float32, (0, 1, 2)))
    # contracting and batch axes of each matrix product, of arrays [B, T, H, D] or [B, H, T, S]
    dots = {"bmm1": ((3, 3), ((0, 2), (0, 2))), "bmm2": ((3, 1), ((0, 1), (0, 2)))}
    out, *lse = custom_call(FORWARD, (query, key, value), results, _config(query, key, params, dots))
    return jnp.swapaxes(out, 1, 2), lse[0] if statistics else None


def gradients(query: Any, key: Any, value: Any, out: Any, lse: Any, grad: Any, params: MaskParams) -> tuple[Any, Any, Any]:
    """Gradients of query, key and value, from the results of `attend` and the gradient of its output."""
    dots = {
        "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
        "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
        "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
        "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
    }
    results: list[Result] = [
        ((batch, heads, length, size), array.dtype, _HEADS_INSIDE)
        for array in (query, key, value)
        for batch, length, heads, size in (array.shape,)
    ]
    found = custom_call(BACKWARD, (query, key, value, lse, grad, out), results, _config(query, key, params, dots))
    d_query, d_key, d_value = (jnp.swapaxes(each, 1, 2) for each in found)
    return d_query, d_key, d_value


def custom_call(name: str, arrays: Sequence[Any], results: Sequence[Result], config: str) -> list[Any]:
    """The results without the last one, cuDNN's workspace, which XLA sizes."""
    workspace: Result = ((0,), jnp.uint8, (0,))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in (*results, workspace)]
    call = jax.ffi.ffi_call(
        name,
        shapes,
        output_layouts=[layout for *_, layout in (*results, workspace)],
        custom_call_api_version=2,
        legacy_backend_config=config,
    )
    return list(call(*arrays))[:-1]


def _config(
    query: Any, key: Any, params: MaskParams, dots: dict[str, tuple[tuple[int, int], tuple[tuple[int, ...], ...]]]
) -> str:
    """XLA's `GpuBackendConfig` message as JSON, where 64-bit integers are strings."""
    batch, queries, heads, _ = query.shape
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": params.scale,
        "intermediate_tensor_shape": _shape((batch, heads, queries, key.shape[1]), _ELEMENT[query.dtype.name]),
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if params.causal else "NO_MASK",
        **{f"{name}_dot_dimension_numbers": _dot(*axes) for name, axes in dots.items()},
        "dropout_rate": 0.0,
        "seed": 42,  # unused without dropout
        "sliding_window_length": params.window or 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})


def _dot(summed: tuple[int, int], kept: tuple[tuple[int, ...], ...]) -> dict[str, list[str]]:
    return {
        f"{side}_{kind}_dimensions": [str(axis) for axis in axes]
        for kind, pair in (("contracting", [(axis,) for axis in summed]), ("batch", kept))
        for side, axes in zip(("lhs", "rhs"), pair, strict=True)
    }


def _shape(sizes: tuple[int, ...], element: str) -> dict[str, Any]:
    """XLA's `ShapeProto` message of a row-major array."""
    layout = {
        **{name: [] for name in ("dim_level_types", "dim_unique", "dim_ordered", "tiles")},
        **dict.fromkeys(("element_size_in_bits", "memory_space", "dynamic_shape_metadata_prefix_bytes"), "0"),
        **{f"{name}_primitive_type": "PRIMITIVE_TYPE_INVALID" for name in ("index", "pointer")},
        "minor_to_major": [str(axis) for axis in reversed(range(len(sizes)))],
    }
    return {
        "element_type": element,
        "dimensions": [str(size) for size in sizes],
        "tuple_shapes": [],
        "layout": layout,
        "is_dynamic_dimension": [False] * len(sizes),
    }


def installed_version() -> tuple[int, ...] | None:
    """Version of the cuDNN distribution that belongs to jax's installed CUDA plugin, `(9, 19, 0)`; None if there is none."""
    for major in (13, 12):
        try:
            importlib.metadata.version(f"jax-cuda{major}-plugin")
            version = importlib.metadata.version(f"nvidia-cudnn-cu{major}")
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return None

"""What cuDNN's documentation says of its attention, in NumPy, in place of the custom calls that XLA gives to it.

It reads what XLA reads: the call's name, its JSON config, the arrays in order, and the shapes and layouts of the results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def even(case: Any) -> Any:
    """A case without the last of an odd number of queries or keys, so that it has gradients."""

    def arrays(rng: np.random.Generator) -> dict[str, Any]:
        return {
            name: array[:, : array.shape[1] // 2 * 2] if name in ("query", "key", "value") else array
            for name, array in case.arrays(rng).items()
        }

    return dataclasses.replace(case, arrays=arrays)


def custom_call(name: str, arrays: Sequence[Any], results: Sequence[Any], config: str) -> list[Any]:
    """As `ejkernel_cuda.cudnn._call.custom_call`."""
    settings = json.loads(config)["cudnn_fmha_backend_config"]
    run = {"__cudnn$fmhaSoftmax": _forward, "__cudnn$fmhaSoftmaxBackward": _backward}[name]
    for (shape, _, layout), rank in zip(results, (len(shape) for shape, *_ in results), strict=True):
        assert sorted(layout) == list(range(rank)) and len(shape) == rank
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in results]

    def compute(*arrays: Any) -> list[Any]:
        with np.errstate(all="ignore"):
            found = run(settings, [np.asarray(array).astype(np.float64) for array in arrays])
        assert [each.shape for each in found[: len(specs)]] == [spec.shape for spec in specs]
        return [each.astype(spec.dtype) for each, spec in zip(found, specs, strict=False)]

    return list(jax.pure_callback(compute, specs, *arrays, vmap_method="sequential"))


def _per_head(settings: dict[str, Any], query: Any, *others: Any) -> list[Any]:
    """`[B, T, H, D]` as `[B, H, T, D]`, key heads once for each of their query heads."""
    group = query.shape[2] // others[0].shape[2]
    assert query.shape[2] == group * others[0].shape[2]
    found = [np.swapaxes(query, 1, 2), *(np.repeat(np.swapaxes(each, 1, 2), group, axis=1) for each in others)]
    batch, heads, queries, keys = (int(size) for size in settings["intermediate_tensor_shape"]["dimensions"])
    assert (batch, heads, queries) == found[0].shape[:3] and keys == found[1].shape[2]
    return found


def _logits(settings: dict[str, Any], query: Any, key: Any) -> Any:
    assert settings["is_flash_attention"] and not settings["is_paged_attention"] and settings["dropout_rate"] == 0
    assert query.shape[-1] % 8 == 0 and query.shape[-1] == key.shape[-1]
    logits = settings["fmha_scale"] * np.einsum("bhtd,bhsd->bhts", query, key)
    row, column = np.ogrid[: logits.shape[2], : logits.shape[3]]
    window = settings["sliding_window_length"]
    if settings["mask_type"] == "NO_MASK":
        assert not window
        return logits
    assert settings["mask_type"] == "CAUSAL"
    seen = (column <= row) & (column > row - window if window else True)
    assert not window or logits.shape[2] <= logits.shape[3]
    assert seen.any(axis=1).all(), "a query sees no key, which cuDNN has no result for"
    return np.where(seen, logits, -np.inf)


def _forward(settings: dict[str, Any], arrays: list[Any]) -> list[Any]:
    query, key, value = _per_head(settings, *arrays)
    logits = _logits(settings, query, key)
    largest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return [np.einsum("bhts,bhsd->bhtd", weights / total, value), (largest + np.log(total))[..., 0]]


def _backward(settings: dict[str, Any], arrays: list[Any]) -> list[Any]:
    query, key, value, statistics, grad, out = arrays
    key_heads = key.shape[2]
    query, key, value = _per_head(settings, query, key, value)
    grad, out = (np.swapaxes(each, 1, 2) for each in (grad, out))
    weights = np.exp(_logits(settings, query, key) - statistics[..., None])
    d_weights = np.einsum("bhtd,bhsd->bhts", grad, value)
    d_logits = settings["fmha_scale"] * weights * (d_weights - (grad * out).sum(axis=-1, keepdims=True))

    def summed(gradient: Any) -> Any:
        batch, heads, *rest = gradient.shape
        return gradient.reshape(batch, key_heads, heads // key_heads, *rest).sum(axis=2)

    return [
        np.einsum("bhts,bhsd->bhtd", d_logits, key),
        summed(np.einsum("bhts,bhtd->bhsd", d_logits, query)),
        summed(np.einsum("bhts,bhtd->bhsd", weights, grad)),
    ]

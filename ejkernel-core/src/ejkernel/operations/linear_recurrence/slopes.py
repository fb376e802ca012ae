"""Log decays of heads that depend on the layer and the head alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def layer_slopes(kind: str, heads: int, layer: Any, layers: int) -> Any:
    """s `[H]`: minus the log decay of each head. `layer` is an int, or a float32 scalar that is traced."""
    if kind == "linear":
        of_heads, of_layer = (8 / max(heads, 1)) * np.arange(heads), 1 - layer / layers
    else:
        depth = (layer - int(kind == "bailing")) / (layers - 1) if layers > 1 else 0.0
        of_heads, of_layer = alibi_slopes(heads), 1 - depth + 1e-5
    return of_heads.astype(getattr(of_layer, "dtype", of_heads.dtype)) * of_layer


def alibi_slopes(heads: int) -> np.ndarray:
    """`2^(-8 (h + 1) / H)` for a power of two; else those of the power below, then every other one of the power above.

    Source: Press, Smith and Lewis, Train Short, Test Long: Attention with Linear Biases, 2022.
    """
    below = 1 << max(heads.bit_length() - 1, 0)
    between = np.arange(1, 2 * (heads - below), 2)
    return np.concatenate([2.0 ** (-8 * np.arange(1, min(heads, below) + 1) / below), 2.0 ** (-4 * between / below)])

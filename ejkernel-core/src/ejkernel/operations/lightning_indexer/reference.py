"""`lightning_indexer` in NumPy float64: one query after the other."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.lightning_indexer.interface import (
    NO_TOKEN,
    LightningIndexerCall,
    LightningIndexerInputs,
    LightningIndexerOutputs,
)


def forward(call: LightningIndexerCall, inputs: LightningIndexerInputs) -> LightningIndexerOutputs:
    tokens = np.full((*call.query.shape[:2], call.k), NO_TOKEN, np.int32)
    lowest = np.finfo(np.float32).min
    for row, query in np.ndindex(tokens.shape[:2]):
        end = inputs.ends[row, query]
        with np.errstate(invalid="ignore", over="ignore"):
            products = np.maximum(inputs.query[row, query] @ inputs.key[row, :end].T, 0)  # [h, end]
            scores = (inputs.weights[row, query][:, None] * products).sum(0)
            if inputs.key_scale is not None:
                scores = scores * inputs.key_scale[row, :end]
        scores = np.where(scores >= lowest, scores, lowest)
        chosen = np.sort(np.argsort(-scores, kind="stable")[: call.k])
        tokens[row, query, : len(chosen)] = chosen
    return LightningIndexerOutputs(tokens)

"""`sample_tokens` in NumPy float64, from the definition: a row costs v^2."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.sample_tokens.interface import NO_TOKEN, SampleTokensCall, SampleTokensInputs, SampleTokensOutputs
from ejkernel.operations.sample_tokens.noise import LARGEST, bits


def probabilities(
    x: np.ndarray, temperature: float, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray | None:
    """Those of the tokens of one row, 0 where they are dropped; None without a distribution."""
    if np.isnan([*x, temperature, top_p, min_p]).any() or np.max(x) == -np.inf:
        return None
    largest = x == np.max(x)
    if temperature <= 0:
        return (np.arange(x.size) == np.argmax(x)).astype(np.float64)
    with np.errstate(all="ignore"):
        weights = np.where(largest, 1, np.where(np.isneginf(x), 0, np.exp((x - np.max(x)) / temperature)))
    above = np.array([np.sum(x > value) for value in x])
    kept = above < top_k if top_k >= 1 else np.ones(x.size, bool)
    if top_p < 1:
        mass = np.array([weights[x > value].sum() for value in x])
        kept = kept & ((mass < top_p * weights[kept].sum()) | largest)
    kept = kept & ((weights >= min_p) | largest)
    return np.where(kept, weights, 0) / weights[kept].sum()


def forward(call: SampleTokensCall, inputs: SampleTokensInputs) -> SampleTokensOutputs:
    rows = inputs.logits.shape[:2]
    x = inputs.logits if inputs.token_mask is None else np.where(inputs.token_mask, inputs.logits, -np.inf)
    top_k = np.full(rows, call.static_top_k or 0) if inputs.top_k is None else np.broadcast_to(inputs.top_k, rows)
    top_p, min_p = (
        np.full(rows, default) if value is None else np.broadcast_to(value, rows)
        for value, default in ((inputs.top_p, 1.0), (inputs.min_p, 0.0))
    )
    temperature = np.broadcast_to(inputs.temperature, rows)
    streams = np.broadcast_to(inputs.streams, (*rows, 2))
    tokens, logprobs = np.full(rows, NO_TOKEN), np.full(rows, np.nan)
    for row in np.ndindex(rows):
        found = probabilities(x[row], *(float(one[row]) for one in (temperature, top_k, top_p, min_p)))
        if found is not None:
            with np.errstate(over="ignore"):
                random = bits(streams[row], np.arange(x.shape[2], dtype=np.uint32))
            exponential = -np.log1p(-np.minimum((random + 0.5) * 2.0**-32, LARGEST))
            with np.errstate(divide="ignore"):
                tokens[row] = np.argmax(np.log(found) - np.log(exponential))
            logprobs[row] = np.log(found[tokens[row]])
    return SampleTokensOutputs(tokens, logprobs if call.return_logprobs else None)

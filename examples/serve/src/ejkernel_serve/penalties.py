"""Changes of logits that depend on which tokens a request has: penalties for those that came before, and `logit_bias`.

The host knows a row's tokens, drafts included, and names the few logits that change. So drafts change no token here either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ejkernel_serve.config import Sampling
from ejkernel_serve.scheduler import Chunk

Adjustments = dict[int, tuple[float, float]]
"""By token a factor and a bias. The logit l becomes l / factor + bias if it is positive, and l * factor + bias if not."""


def adjustments(sampling: Sampling, prompt: Iterable[int], generated: Counter[int]) -> Adjustments:
    """Of the next token's logits, after a prompt and so often generated tokens.

    Source: the repetition penalty of Keskar et al., "CTRL", 2019, equation 5, over prompt and generated tokens as in Hugging Face
    transformers; presence and frequency penalties as OpenAI documents them, over generated tokens.
    """
    found: Adjustments = {token: (1.0, bias) for token, bias in sampling.logit_bias.items()}
    if sampling.penalised:
        for token in {*prompt, *generated}:
            count = generated[token]
            penalty = sampling.frequency_penalty * count + (sampling.presence_penalty if count else 0.0)
            found[token] = sampling.repetition_penalty, sampling.logit_bias.get(token, 0.0) - penalty
    return {token: change for token, change in found.items() if change != (1.0, 0.0)}


def of_chunk(chunk: Chunk) -> list[Adjustments]:
    """Of the logits after the chunk's last token, then after each of its drafts."""
    request, sampling = chunk.request, chunk.request.sampling
    if chunk.size < request.remaining or not (sampling.penalised or sampling.logit_bias):
        return [{} for _ in range(1 + len(chunk.drafts))]  # nothing is drawn, or nothing is changed
    prompt = {*request.tokens[: request.prompt]} if sampling.penalised else set[int]()
    counts = [Counter(request.generated if sampling.penalised else ())]
    for draft in chunk.drafts:
        counts.append(counts[draft.parent + 1].copy())
        counts[-1][draft.token] += 1
    return [adjustments(sampling, prompt, count) for count in counts]


def arrays(rows: Sequence[Adjustments], sizes: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    """`adjusted`, `factor` and `bias` of a step, `[rows, K]` with the smallest of these sizes as K; none of them if it is 0."""
    size = next(size for size in sizes if size >= max(map(len, rows), default=0))
    if not size:
        return {}
    adjusted, factor = np.full((len(rows), size), -1, np.int32), np.ones((len(rows), size), np.float32)
    bias = np.zeros((len(rows), size), np.float32)
    for number, row in enumerate(rows):
        for place, (token, change) in enumerate(row.items()):
            adjusted[number, place] = token
            factor[number, place], bias[number, place] = change
    return {"adjusted": adjusted, "factor": factor, "bias": bias}

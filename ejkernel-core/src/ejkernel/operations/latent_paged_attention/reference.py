"""`latent_paged_attention` in NumPy float64: one query token after the other, all heads at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.operations.latent_paged_attention.interface import (
    LatentPagedAttentionCall,
    LatentPagedAttentionInputs,
    LatentPagedAttentionOutputs,
)


def _of(array: Any, member: int) -> Any:
    """The batch member's own array, or the one that all share."""
    return None if array is None else array[member % len(array)]


@dataclasses.dataclass(frozen=True)
class _Token:
    """One query token: where it is, page and offset of the keys that it sees, and its numbers `[h, keys]`."""

    at: tuple[int, int]
    page: np.ndarray
    offset: np.ndarray
    latent: np.ndarray  # [keys, r]
    rotary: np.ndarray  # [keys, e]
    raw: np.ndarray
    slope: np.ndarray
    weights: np.ndarray
    lse: np.ndarray  # [h]


def _scale(scale: Any, member: int) -> float:
    return 1.0 if scale is None else float(_of(scale, member)[0])


def _tokens(call: LatentPagedAttentionCall, inputs: LatentPagedAttentionInputs) -> Iterator[_Token]:
    _, pages, size, _ = inputs.pages.shape
    width, rotary_width = inputs.query_nope.shape[3], inputs.query_pe.shape[3]
    for b in range(len(inputs.query_nope)):
        starts, lengths, tables = (_of(a, b) for a in (inputs.query_start_loc, inputs.kv_lens, inputs.block_tables))
        for start, end, length, table in zip(starts, starts[1:], lengths, tables, strict=False):
            for token in range(start, end):
                position = int(length) - int(end) + token
                keys = np.arange(max(0, min(position + 1, int(length), len(table) * size)))
                keys = keys if call.window is None else keys[keys > position - call.window]
                keys = keys if inputs.first_keys is None else keys[keys >= _of(inputs.first_keys, b)[token]]
                keys = keys[(table[keys // size] >= 0) & (table[keys // size] < pages)] if keys.size else keys
                page, offset = table[keys // size] if keys.size else keys, keys % size
                rows = _of(inputs.pages, b)[page, offset]
                latent, rotary = rows[:, :width], rows[:, call.pe_offset : call.pe_offset + rotary_width]
                raw = inputs.query_nope[b, token] @ latent.T + inputs.query_pe[b, token] @ rotary.T
                logits, slope = call.softmax_scale * _scale(inputs.key_scale, b) * raw, np.ones_like(raw)
                if call.logits_soft_cap is not None:
                    capped = np.tanh(logits / call.logits_soft_cap)
                    logits, slope = call.logits_soft_cap * capped, 1 - capped**2
                largest = logits.max(-1, initial=-np.inf)
                lse = largest + np.log(np.exp(logits - largest[:, None]).sum(-1)) if keys.size else largest
                weights = np.exp(logits - lse[:, None])
                yield _Token((b, token), page, offset, latent, rotary, raw, slope, weights, lse)


def forward(call: LatentPagedAttentionCall, inputs: LatentPagedAttentionInputs) -> LatentPagedAttentionOutputs:
    out, lse = np.zeros(inputs.query_nope.shape), np.full(inputs.query_nope.shape[:3], -np.inf)
    for token in _tokens(call, inputs):
        out[token.at] = _scale(inputs.value_scale, token.at[0]) * (token.weights @ token.latent)
        lse[token.at] = token.lse
    return LatentPagedAttentionOutputs(out, lse)


def backward(
    call: LatentPagedAttentionCall,
    inputs: LatentPagedAttentionInputs,
    outputs: LatentPagedAttentionOutputs,
    cotangents: LatentPagedAttentionOutputs,
) -> LatentPagedAttentionInputs:
    grad: dict[str, Any] = {n: None if (a := getattr(inputs, n)) is None else np.zeros(a.shape) for n in _DIFFERENTIABLE}
    width, rotary_width = inputs.query_nope.shape[3], inputs.query_pe.shape[3]
    for token in _tokens(call, inputs):
        member = token.at[0]
        key_scale, value_scale = _scale(inputs.key_scale, member), _scale(inputs.value_scale, member)
        d_out = cotangents.out[token.at]
        d_lse = 0.0 if cotangents.lse is None else cotangents.lse[token.at][:, None]
        products = d_out @ token.latent.T
        mean = (token.weights * value_scale * products).sum(-1, keepdims=True)
        d_raw = token.weights * (value_scale * products - mean + d_lse) * token.slope
        factor = call.softmax_scale * key_scale
        grad["query_nope"][token.at] += factor * d_raw @ token.latent
        grad["query_pe"][token.at] += factor * d_raw @ token.rotary
        row = np.zeros((len(token.page), inputs.pages.shape[3]))
        row[:, :width] += factor * d_raw.T @ inputs.query_nope[token.at] + value_scale * token.weights.T @ d_out
        row[:, call.pe_offset : call.pe_offset + rotary_width] += factor * d_raw.T @ inputs.query_pe[token.at]
        np.add.at(_of(grad["pages"], member), (token.page, token.offset), row)
        if grad["key_scale"] is not None:
            _of(grad["key_scale"], member)[0] += call.softmax_scale * (d_raw * token.raw).sum()
        if grad["value_scale"] is not None:
            _of(grad["value_scale"], member)[0] += (token.weights * products).sum()
    return LatentPagedAttentionInputs(**{**dict.fromkeys(LatentPagedAttentionInputs._fields), **grad})


_DIFFERENTIABLE = ("query_nope", "query_pe", "pages", "key_scale", "value_scale")

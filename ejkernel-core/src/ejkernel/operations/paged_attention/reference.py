"""`paged_attention` in NumPy float64: one query token and one head after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.operations.common.pages import FUSED, alternating
from ejkernel.operations.paged_attention.interface import (
    OPERATION,
    PagedAttentionCall,
    PagedAttentionInputs,
    PagedAttentionOutputs,
)


def _of(array: Any, row: int) -> Any:
    """The batch member's own array, or the one that all share."""
    return None if array is None else array[row % array.shape[0]]


def token_major(pages: Any, layout: str) -> tuple[Any, Any]:
    """Views `[P, page_size, K, D]` of one member's pages: its keys and, if it holds them too, its values."""
    if layout in FUSED:
        heads = alternating(pages, layout)
        return heads[:, :, 0::2], heads[:, :, 1::2]
    order = {"pthd": (0, 1, 2, 3), "phtd": (0, 2, 1, 3), "hptd": (1, 2, 0, 3)}[layout]
    return pages.transpose(order), None


@dataclasses.dataclass(frozen=True)
class _Row:
    """One query token and head: batch member, request, token, its number among the new ones, position, heads, keys that it sees,
    their pages and offsets, and their numbers among the new tokens (-1: not one of them, or beyond qq_bias)."""

    member: int
    request: int
    token: int
    local: int
    position: int
    head: int
    key_head: int
    keys: np.ndarray
    page: np.ndarray
    offset: np.ndarray
    new: np.ndarray


def _rows(call: PagedAttentionCall, inputs: PagedAttentionInputs) -> Iterator[_Row]:
    batch, _, heads, _ = inputs.query.shape
    size, pages = call.pages.page_size, call.pages.pages
    for b in range(batch):
        starts, lengths, tables = (_of(a, b) for a in (inputs.query_start_loc, inputs.kv_lens, inputs.block_tables))
        bias = _of(inputs.qq_bias, b)
        for r, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            first_new = int(length) - (int(end) - int(start))
            for token in range(int(start), int(end)):
                local, position = token - int(start), first_new + token - int(start)
                keys = np.arange(min(int(length), len(tables[r]) * size))
                keys = keys[tables[r][keys // size] < pages] if keys.size else keys
                keys = keys[tables[r][keys // size] >= 0] if keys.size else keys
                keys = keys[keys <= position] if call.causal else keys
                keys = keys if call.window is None else keys[keys > position - call.window]
                keys = keys if inputs.first_keys is None else keys[keys >= _of(inputs.first_keys, b)[token]]
                new = keys - first_new
                if bias is not None:
                    width = bias.shape[-1]
                    new = np.where((new >= 0) & (new < width) & (local < width), new, -1)
                    hidden = (new >= 0) & (bias[r % len(bias), min(local, width - 1), new] == -np.inf)
                    keys, new = keys[~hidden], new[~hidden]
                page = tables[r][keys // size] if keys.size else keys
                for h in range(heads):
                    key_head = h // (heads // call.heads)
                    yield _Row(b, r, token, local, position, h, key_head, keys, page, keys % size, new)


class _Attended:
    """One row's numbers: raw products, scaled and capped ones, weights, sinks' weights and log-sum-exp."""

    def __init__(self, call: PagedAttentionCall, inputs: PagedAttentionInputs, row: _Row) -> None:
        keys, fused = token_major(_of(inputs.key_pages, row.member), call.layout)
        values = fused if fused is not None else token_major(_of(inputs.value_pages, row.member), call.layout)[0]
        self.query = inputs.query[row.member, row.token, row.head]
        self.key = keys[row.page, row.offset, row.key_head, : self.query.shape[0]]
        self.value = values[row.page, row.offset, row.key_head, : call.value_size]
        scale = _of(inputs.key_scale, row.member)
        self.key_head_scale = 1.0 if scale is None else scale[row.key_head % len(scale)]
        self.key_token_scale = _at_rows(_of(inputs.key_token_scale, row.member), row)
        self.key_scale = self.key_head_scale * self.key_token_scale
        scale = _of(inputs.value_scale, row.member)
        self.value_head_scale = 1.0 if scale is None else scale[row.key_head % len(scale)]
        self.value_token_scale = _at_rows(_of(inputs.value_token_scale, row.member), row)
        self.value_scale = self.value_head_scale * self.value_token_scale
        self.raw = self.key @ self.query
        logits, self.slope = call.softmax_scale * self.key_scale * self.raw, np.ones(len(self.raw))
        if call.logits_soft_cap is not None:
            capped = np.tanh(logits / call.logits_soft_cap)
            logits, self.slope = call.logits_soft_cap * capped, 1 - capped**2
        if inputs.alibi_slopes is not None:
            logits = logits + _of(inputs.alibi_slopes, row.member)[row.head] * (row.keys - row.position)
        if inputs.qq_bias is not None:
            bias = _of(inputs.qq_bias, row.member)
            logits = logits + np.where(
                row.new >= 0, bias[row.request % len(bias), min(row.local, bias.shape[-1] - 1), row.new], 0
            )
        sinks = np.zeros(0) if inputs.softmax_aux is None else _of(inputs.softmax_aux, row.member)[row.head]
        every = np.concatenate([logits, sinks])
        largest = every.max(initial=-np.inf)
        self.lse = -np.inf if largest == -np.inf else largest + np.log(np.exp(every - largest).sum())
        weights = np.zeros(len(every)) if self.lse == -np.inf else np.exp(every - self.lse)
        self.weights, self.sink_weights = weights[: len(logits)], weights[len(logits) :]


def _at_rows(scale: Any, row: _Row) -> Any:
    """The factor of each stored row that a query token reads."""
    return np.ones(len(row.keys)) if scale is None else scale[row.page, row.offset, row.key_head % scale.shape[2]]


def forward(call: PagedAttentionCall, inputs: PagedAttentionInputs) -> PagedAttentionOutputs:
    out = np.zeros((*inputs.query.shape[:3], call.value_size))
    lse = np.full(inputs.query.shape[:3], -np.inf)
    for row in _rows(call, inputs):
        seen = _Attended(call, inputs, row)
        out[row.member, row.token, row.head] = (seen.weights * seen.value_scale) @ seen.value
        lse[row.member, row.token, row.head] = seen.lse
    return PagedAttentionOutputs(out, lse)


def backward(
    call: PagedAttentionCall, inputs: PagedAttentionInputs, outputs: PagedAttentionOutputs, cotangents: PagedAttentionOutputs
) -> PagedAttentionInputs:
    grad = PagedAttentionInputs(*(None if array is None else np.zeros(array.shape) for array in inputs))
    for row in _rows(call, inputs):
        seen = _Attended(call, inputs, row)
        where = (row.member, row.token, row.head)
        d_out = np.zeros(call.value_size) if cotangents.out is None else cotangents.out[where]
        d_lse = 0.0 if cotangents.lse is None else cotangents.lse[where]
        products = seen.value @ d_out
        d_weights = seen.value_scale * products
        mean = seen.weights @ d_weights
        d_logits = seen.weights * (d_weights - mean + d_lse)
        d_raw = d_logits * seen.slope

        grad.query[where] += call.softmax_scale * (seen.key_scale * d_raw) @ seen.key
        keys, values = token_major(_of(grad.key_pages, row.member), call.layout)
        values = values if values is not None else token_major(_of(grad.value_pages, row.member), call.layout)[0]
        for number, (page, offset) in enumerate(zip(row.page, row.offset, strict=True)):
            d_key, d_value = keys[page, offset, row.key_head], values[page, offset, row.key_head]
            d_key[: len(seen.query)] += call.softmax_scale * seen.key_scale[number] * d_raw[number] * seen.query
            d_value[: call.value_size] += seen.value_scale[number] * seen.weights[number] * d_out
        for scale, part in (
            (grad.key_scale, call.softmax_scale * (d_raw @ (seen.key_token_scale * seen.raw))),
            (grad.value_scale, (seen.weights * seen.value_token_scale) @ products),
        ):
            if scale is not None:
                _of(scale, row.member)[row.key_head % scale.shape[1]] += part
        for scale, parts in (
            (grad.key_token_scale, call.softmax_scale * seen.key_head_scale * d_raw * seen.raw),
            (grad.value_token_scale, seen.value_head_scale * seen.weights * products),
        ):
            if scale is not None:
                np.add.at(_of(scale, row.member), (row.page, row.offset, row.key_head % scale.shape[3]), parts)
        if grad.softmax_aux is not None:
            _of(grad.softmax_aux, row.member)[row.head] += seen.sink_weights * (d_lse - mean)
        if grad.alibi_slopes is not None:
            _of(grad.alibi_slopes, row.member)[row.head] += d_logits @ (row.keys - row.position)
        if grad.qq_bias is not None:
            bias, new = _of(grad.qq_bias, row.member), row.new >= 0
            if new.any():  # else the token may be beyond the last row of the bias
                np.add.at(bias[row.request % len(bias), row.local], row.new[new], d_logits[new])
    moving = OPERATION.differentiable
    return PagedAttentionInputs(**{name: array if name in moving else None for name, array in grad._asdict().items()})

"""torch's own attention: `scaled_dot_product_attention`, and FlexAttention compiled with the call's mask and soft cap."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Built, Peer, beyond
from ejkernel_bench.peers._torch import compiled
from ejkernel_bench.peers.jax_attention import window_of


def _sdpa(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "query", "key", "value", "mask", "softmax_scale", "causal")
    if reason:
        return reason
    if call.mask is not None and call.causal:
        return "takes a mask or causal, not both"
    from torch.nn.functional import scaled_dot_product_attention

    grouped = call.query.shape[2] != call.key.shape[2]

    def attention(x: Any) -> Mapping[str, Any]:
        heads_first = (array.transpose(1, 2) for array in (x.query, x.key, x.value))
        out = scaled_dot_product_attention(
            *heads_first, attn_mask=x.mask, is_causal=call.causal, scale=call.softmax_scale, enable_gqa=grouped
        )
        return {"out": out.transpose(1, 2)}

    return attention


def _flex(call: Any, inputs: Any) -> Built | str:
    known = ("query", "key", "value", "softmax_scale", "causal", "window", "logits_soft_cap", "query_segments", "key_segments")
    reason = beyond(call, *known)
    if reason:
        return reason
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def capped(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return call.logits_soft_cap * torch.tanh(score / call.logits_soft_cap)

    def prepare(x: Any) -> dict[str, Any]:
        mask = _mask(call, x)
        batch = None if x.query_segments is None else max(len(x.query_segments), len(x.key_segments))
        sizes = {"Q_LEN": call.query.shape[1], "KV_LEN": call.key.shape[1], "device": x.query.device}
        block_mask = None if mask is None else create_block_mask(mask, B=batch, H=None, **sizes)
        return {"query": x.query, "key": x.key, "value": x.value, "block_mask": block_mask}

    flex = compiled(flex_attention)
    grouped = call.query.shape[2] != call.key.shape[2]
    score = None if call.logits_soft_cap is None else capped

    def attention(x: Any) -> Mapping[str, Any]:
        heads_first = (array.transpose(1, 2) for array in (x.query, x.key, x.value))
        out = flex(*heads_first, score_mod=score, block_mask=x.block_mask, scale=call.softmax_scale, enable_gqa=grouped)
        return {"out": out.transpose(1, 2)}

    return Built(attention, prepare)


def _mask(call: Any, x: Any) -> Any:
    """The call's visibility as FlexAttention asks for it; None if everything is seen."""
    window = window_of(call)
    rules: list[Any] = []
    if call.causal:
        rules.append(lambda batch, head, query, key: query >= key)
    if window is not None:
        rules.append(lambda batch, head, query, key: (query - key <= window[0]) & (key - query <= window[1]))
    if x.query_segments is not None and x.key_segments is not None:
        queries, keys = x.query_segments, x.key_segments

        def same(batch: Any, head: Any, query: Any, key: Any) -> Any:
            mine = queries[batch % len(queries), query]
            return (mine == keys[batch % len(keys), key]) & (mine >= 0)

        rules.append(same)
    if not rules:
        return None

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:  # FlexAttention counts the parameters
        return functools.reduce(operator.and_, [rule(batch, head, query, key) for rule in rules])

    return mask


PEERS = (
    Peer("torch SDPA", {"flash_attention": _sdpa}, ("torch",), {"torch": "2.5"}, ("cpu", "gpu"), "torch"),
    Peer("FlexAttention", {"flash_attention": _flex}, ("torch",), {"torch": "2.6"}, ("gpu",), "torch"),
)

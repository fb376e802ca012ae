"""FlashInfer: decoding from a paged cache, one new token for each request. Its plan is made before the clock starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel_bench.peers._peer import Built, Peer, beyond

_WORKSPACE = 2**28


def _decode(call: Any, inputs: Any) -> Built | str:
    known = (
        "query",
        "key_pages",
        "value_pages",
        "query_start_loc",
        "kv_lens",
        "block_tables",
        "layout",
        "softmax_scale",
        "logits_soft_cap",
    )
    reason = beyond(call, *known, "key_scale", "value_scale")
    if reason:
        return reason
    if call.layout != "pthd" or call.value_pages is None or call.value_size != call.query.shape[3]:
        return "takes pages [pages, page_size, heads, size], keys and values of one size apart"
    scales = inputs.key_scale, inputs.value_scale
    if any(scale is not None and scale.size > 1 for scale in scales):
        return "takes one scale for all keys and one for all values"
    starts, lengths = np.asarray(inputs.query_start_loc), np.asarray(inputs.kv_lens)
    if starts.shape[0] != 1 or call.query.shape[0] != 1 or np.any(np.diff(starts[0]) != 1) or np.any(lengths < 1):
        return "decodes one new token for each request"
    if int(starts[0, -1]) != call.query.shape[1]:
        return "takes no tokens beyond those of the requests"
    import flashinfer
    import torch

    key_scale, value_scale = (None if scale is None else float(np.asarray(scale).item()) for scale in scales)

    def prepare(x: Any) -> Mapping[str, Any]:
        page, tables = call.pages.page_size, np.asarray(inputs.block_tables)[0]
        counts = -(-lengths[0] // page)
        indices = np.concatenate([row[:count] for row, count in zip(tables, counts, strict=True)]).astype(np.int32)
        described = (np.concatenate([[0], np.cumsum(counts)]), indices, (lengths[0] - 1) % page + 1)
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=x.query.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            *(torch.as_tensor(array.astype(np.int32), device=x.query.device) for array in described),
            call.query.shape[2],
            call.heads,
            call.query.shape[3],
            page,
            logits_soft_cap=call.logits_soft_cap,
            q_data_type=x.query.dtype,
            kv_data_type=x.key_pages.dtype,
            sm_scale=call.softmax_scale,
        )
        return {"query": x.query, "pages": (x.key_pages[0], x.value_pages[0]), "wrapper": wrapper}

    def decode(x: Any) -> Mapping[str, Any]:
        return {"out": x.wrapper.run(x.query[0], x.pages, k_scale=key_scale, v_scale=value_scale)[None]}

    return Built(decode, prepare, refuses_backward="has no gradients")


PEERS = (
    Peer(
        "FlashInfer",
        {"paged_attention": _decode},
        ("torch", "flashinfer"),
        {"flashinfer-python": "0.2"},
        ("gpu",),
        "torch",
    ),
)

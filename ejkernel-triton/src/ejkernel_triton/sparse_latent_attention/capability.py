"""Which calls of `sparse_latent_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.sparse_latent_attention.interface import SparseLatentAttentionCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal
from ejkernel_triton._latents.config import MAX_LATENT, MAX_REST, MAX_SPLITS

MAX_PROGRAMS = 2**31 - 1


def supports_forward(call: SparseLatentAttentionCall, target: Target) -> str | None:
    batch, length, heads, size = call.query.shape
    if call.value_size > MAX_LATENT:
        return f"values of {call.value_size} channels are above {MAX_LATENT}, the most that one program holds"
    if size - call.value_size > MAX_REST:
        return f"{size - call.value_size} channels beside the values are above {MAX_REST}, the most that one program holds"
    if batch * length * heads * MAX_SPLITS > MAX_PROGRAMS:
        return f"{length} queries of {heads} heads, {batch} times, need more than {MAX_PROGRAMS} programs"
    return refusal(target, {"query": call.query, "key_value": call.key_value})


def supports_backward(call: SparseLatentAttentionCall, target: Target) -> str | None:
    tokens = call.query.shape[0] * call.key_value.shape[1]
    entries = call.query.shape[0] * call.query.shape[1] * call.token_indices.shape[2]
    if max(tokens, entries) > MAX_PROGRAMS:
        return f"{tokens} tokens, named {entries} times, need more than {MAX_PROGRAMS} programs"
    return supports_forward(call, target)

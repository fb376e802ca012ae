"""Which calls of `flash_attention` cuDNN runs with this operation's semantics.

cuDNN reports unsupported calls while a program is compiled, where `jit` lets nobody catch the error. So this module refuses what
its interface refuses (`sdpa_support_surface.h` and `scaled_dot_product_flash_attention.h` of cudnn-frontend 1.23, and jax's
checks).
"""

from __future__ import annotations

import math
import os
import re

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import HALVES, array_problem, device_problem
from ejkernel_cuda.cudnn._call import installed_version
from ejkernel_cuda.cudnn.flash_attention.band import Band, band_of

MOST_ELEMENTS = 2**31 - 1
MOST_HEADS = 65535
"""Blocks along the second and third axis of a launch."""
ANY_ORDER = "EJKERNEL_NONDETERMINISTIC"

_WRONG_VERSIONS = ((9, 10, 0), (9, 10, 1))
_ORDERED = re.compile(r"--xla_gpu_(?:exclude_nondeterministic|deterministic)_ops(?:=(?:true|1))?(?!\S)", re.IGNORECASE)


def supports_forward(call: FlashAttentionCall, target: Target) -> str | None:
    return _refusal(call, target)


def supports_backward(call: FlashAttentionCall, target: Target) -> str | None:
    return _refusal(call, target) or _gradient_refusal(call, target)


def _refusal(call: FlashAttentionCall, target: Target) -> str | None:
    arrays = {name: getattr(call, name) for name in ("query", "key", "value")}
    return (
        device_problem(target)
        or array_problem(arrays, HALVES)
        or _feature_refusal(call)
        or _size_refusal(call, target)
        or _band_refusal(call)
        or _version_refusal(target)
    )


def _feature_refusal(call: FlashAttentionCall) -> str | None:
    arrays = {
        "bias": "a bias of -inf masks its pair, and a fully masked row must give 0; cuDNN gives NaN",
        "mask": "a fully masked row must give 0; cuDNN gives the mean of the values",
        "query_segments": "segments and lengths are not passed to cuDNN: queries that see no key must give 0",
        "query_positions": "cuDNN counts positions itself",
        "key_positions": "cuDNN counts positions itself",
        "softmax_aux": "XLA passes no sinks to cuDNN",
        "chunk_size": "cuDNN has no chunks",
        "prefix": "cuDNN has no prefix in its causal mask",
        "logits_soft_cap": "XLA passes no soft cap to cuDNN",
    }
    for name, reason in arrays.items():
        if getattr(call, name) is not None:
            return f"{name}: {reason}"
    if call.dropout_rate:
        return f"dropout_prob is {call.dropout_rate}, and cuDNN's dropout mask differs from every other platform's"
    if not call.normalize_output:
        return "normalize_output=False: cuDNN returns normalised output only"
    if call.logits_dtype != "float32":
        return f"logits_dtype is {call.logits_dtype}, cuDNN keeps logits in float32"
    if not call.softmax_scale > 0:
        return f"softmax_scale is {call.softmax_scale}, cuDNN needs one above 0"
    return None


def _size_refusal(call: FlashAttentionCall, target: Target) -> str | None:
    batch, _, heads, _ = call.query.shape
    for name in ("query", "key", "value"):
        spec = getattr(call, name)
        if not spec.size:
            return f"{name} has shape {spec.shape}, an empty array"
    size, most = padded_size(call), 256 if target.capability is not None and target.capability[0] == 9 else 128
    if size > most:
        return f"heads of {call.query.shape[3]} with values of {call.value.shape[3]}, cuDNN takes up to {most} on {target}"
    if max(batch, heads) > MOST_HEADS:
        return f"a batch of {batch} with {heads} heads, more than {MOST_HEADS} of one"
    if max(math.prod(spec.shape[:3]) * size for spec in (call.query, call.key)) > MOST_ELEMENTS:
        return f"query {call.query} or key {call.key} has more than {MOST_ELEMENTS} elements, which was not tried"
    return None


def padded_size(call: FlashAttentionCall) -> int:
    """The head size of the padded arrays: the larger one, rounded up to a multiple of 8."""
    return -(-max(call.query.shape[3], call.value.shape[3]) // 8) * 8


def _band_refusal(call: FlashAttentionCall) -> str | None:
    band = band_of(call)
    return band if isinstance(band, str) else None


def _version_refusal(target: Target) -> str | None:
    version = installed_version()
    if version in _WRONG_VERSIONS:
        return f"attention of cuDNN {_written(version)} is known to be faulty; install 9.10.2 or newer"
    return _needed_version(target, (10, 3), (9, 11, 0), exactly=True)


def _gradient_refusal(call: FlashAttentionCall, target: Target) -> str | None:
    if call.return_lse:
        return "return_lse: cuDNN takes no gradient of the log-sum-exp"
    band, queries = band_of(call), call.query.shape[1]
    if isinstance(band, Band) and (queries % 2 or band.keys % 2):
        return f"{queries} queries see {band.keys} keys; jax lets cuDNN form gradients for even numbers only, others were not tried"
    if _ORDERED.search(os.environ.get("XLA_FLAGS", "")):
        return _needed_version(target, (10, 0), (9, 18, 0))
    if os.environ.get(ANY_ORDER) == "1":
        return None
    return (
        f"cuDNN adds gradients up in any order, so that repeats differ in their last bits; {ANY_ORDER}=1 permits that, and "
        "XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true makes it keep an order, in more time and memory"
    )


def _needed_version(target: Target, since: tuple[int, int], needed: tuple[int, ...], *, exactly: bool = False) -> str | None:
    """Why the installed cuDNN will not do for a capability, from `since` on or `exactly` that one; an unknown one will not."""
    capability = target.capability or (0, 0)
    version = installed_version()
    if (capability != since if exactly else capability < since) or (version is not None and version >= needed):
        return None
    have = "the installed one is not known" if version is None else f"{_written(version)} is installed"
    return f"needs cuDNN {_written(needed)} or newer for this on {target}, {have}"


def _written(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version or ()))

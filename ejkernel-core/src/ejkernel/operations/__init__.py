"""The operations that core owns, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ejkernel._records import resolve
from ejkernel.errors import invalid, suggestion

if TYPE_CHECKING:
    from ejkernel.operation import Operation

OPERATIONS: Mapping[str, str] = {
    name: f"ejkernel.operations.{name}.interface:OPERATION"
    for name in (
        "add_rms_norm",
        "block_sparse_attention",
        "cross_entropy",
        "delta_rule",
        "flash_attention",
        "grouped_matmul",
        "kl_divergence",
        "latent_paged_attention",
        "layer_norm",
        "linear_recurrence",
        "mean_pooling",
        "native_sparse_attention",
        "paged_attention",
        "paged_cache_update",
        "qk_norm_rope",
        "quantized_matmul",
        "rms_norm",
        "rope",
        "rwkv4",
        "selective_scan",
        "softmax",
        "sparse_latent_attention",
    )
}


@functools.cache
def get_operation(name: str) -> Operation:
    """The operation of this name.

    Raises:
        ValueError: there is none; the message suggests a close name.
    """
    if name not in OPERATIONS:
        raise invalid("operation", repr(name), f"one of {', '.join(sorted(OPERATIONS))}" + suggestion(name, OPERATIONS))
    return resolve(OPERATIONS[name])


def public_function(name: str) -> Callable[..., Any]:
    """The public function of this name in `ejkernel.modules`.

    Raises:
        ValueError: there is none; the message suggests a close name.
    """
    from ejkernel import modules

    if name not in modules.FUNCTIONS:
        plain = "; that one is the same on every platform" if name in modules.__all__ else suggestion(name, modules.FUNCTIONS)
        raise invalid("operation", repr(name), "the name of a public function that platforms implement" + plain)
    return getattr(modules, name)

"""Which code runs each operation: one switch for all, and single ones by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ejkernel_train import fast, plain


class Operations(NamedTuple):
    """One function each; `plain.py` says what they take and return."""

    attention: Callable[..., Any]
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    rope: Callable[..., Any]
    qk_norm_rope: Callable[..., Any]
    cross_entropy: Callable[..., Any]
    causal_conv1d: Callable[..., Any]
    gated_rms_norm: Callable[..., Any]
    gated_delta_rule: Callable[..., Any]
    state_space: Callable[..., Any]
    swiglu: Callable[..., Any]
    moe_route: Callable[..., Any]
    moe_permute: Callable[..., Any]
    moe_unpermute: Callable[..., Any]
    grouped_matmul: Callable[..., Any]
    scaled_matmul: Callable[..., Any]


def choose(kernels: str, in_plain_jax: Sequence[str] = ()) -> Operations:
    """All from `fast` with kernels="ejkernel", but for those `in_plain_jax`; all from `plain` with kernels="plain".

    Raises:
        ValueError: a name that is none of `Operations`.
    """
    unknown = sorted({*in_plain_jax} - {*Operations._fields})
    if unknown:
        raise ValueError(f"no operation is called {', '.join(unknown)}; there are {', '.join(Operations._fields)}")
    modules = {name: plain if kernels == "plain" or name in in_plain_jax else fast for name in Operations._fields}
    return Operations(**{name: getattr(module, name) for name, module in modules.items()})

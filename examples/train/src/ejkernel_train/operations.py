"""Which code runs each operation: one switch for all, and single ones by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MODULES = {"ejkernel": "fast", "plain": "plain", "peers": "peers"}
"""The builds, and the modules that have their operations."""


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
    gated_state_space: Callable[..., Any]
    feed_forward: Callable[..., Any]
    swiglu: Callable[..., Any]
    moe_route: Callable[..., Any]
    moe_permute: Callable[..., Any]
    moe_unpermute: Callable[..., Any]
    grouped_matmul: Callable[..., Any]
    scaled_matmul: Callable[..., Any]
    quantize_float8: Callable[..., Any]


def choose(kernels: str, in_plain_jax: Sequence[str] = ()) -> Operations:
    """All from the module of this build, but for those `in_plain_jax`.

    Raises:
        ValueError: a name that is none of `Operations`; the build "peers" where its packages are missing.
    """
    unknown = sorted({*in_plain_jax} - {*Operations._fields})
    if unknown:
        raise ValueError(f"no operation is called {', '.join(unknown)}; there are {', '.join(Operations._fields)}")
    plain, chosen = (importlib.import_module(f"ejkernel_train.{MODULES[name]}") for name in ("plain", kernels))
    return Operations(**{name: getattr(plain if name in in_plain_jax else chosen, name) for name in Operations._fields})

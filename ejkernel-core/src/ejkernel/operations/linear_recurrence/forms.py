"""What the functions over `linear_recurrence` share."""

from __future__ import annotations

from typing import Any

from ejkernel import typing as t
from ejkernel.operations.linear_recurrence.interface import OPERATION as _LINEAR_RECURRENCE


def dims_of(cu_seqlens: Any, g_gamma: Any) -> dict[str, str]:
    """The axes of the arrays, for `over_mesh`."""
    state = "b h d v" if cu_seqlens is None else "n h d v"
    dims = {"query": "b t h d", "key": "b t h d", "value": "b t h v", "g": "b t h", "gk": "b t h d", "gv": "b t h v"}
    dims["g_gamma"] = "h" if len(getattr(g_gamma, "shape", ())) == 1 else "b h"
    return {**dims, "initial_state": state, "cu_seqlens": "s"}


def recurrence(*, platform: t.Platforms, cfg: Any, softmax_scale: Any, reverse: bool, return_state: bool, **arrays: Any) -> Any:
    options = {"softmax_scale": softmax_scale, "reverse": reverse, "return_state": return_state}
    return _LINEAR_RECURRENCE.invoke(arrays, options, platform=platform, cfg=cfg)

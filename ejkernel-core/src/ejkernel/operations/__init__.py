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
        "cross_entropy",
        "flash_attention",
        "grouped_matmul",
        "kl_divergence",
        "layer_norm",
        "mean_pooling",
        "rms_norm",
        "rope",
        "softmax",
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
        raise invalid("operation", repr(name), "the name of a public function" + suggestion(name, modules.FUNCTIONS))
    return getattr(modules, name)

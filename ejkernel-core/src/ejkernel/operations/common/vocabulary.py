"""What losses over a vocabulary share: rows of logits, or of hidden states with the head that makes logits of them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from ejkernel.call.arrays import ArraySpec
from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.checks import check_compute
from ejkernel.utils.integers import as_int32
from ejkernel.utils.tracing import refuse_traced


def check_rows(name: str, x: Any, head: Any, head_name: str, transpose_head: bool) -> int:
    """Refuse rows and a head that do not fit; the size of the vocabulary.

    Raises:
        ValueError: a shape does not fit.
        TypeError: not of a floating type.
    """
    check_compute(name, x)
    if not x.shape:
        raise invalid(name, "shape ()", "at least one axis")
    if len(x.shape) > 7:
        raise invalid(name, f"{len(x.shape)} axes", "at most 7")
    if head is None:
        vocabulary = x.shape[-1]
        if vocabulary == 0:
            raise invalid(name, "a vocabulary of 0", "at least one entry")
        return vocabulary
    check_compute(head_name, head, ndim=2)
    if head.shape[1 if transpose_head else 0] != x.shape[-1]:
        meaning = "[V, D]" if transpose_head else "[D, V]"
        raise invalid(head_name, f"shape {tuple(head.shape)}", f"{meaning} with D = {x.shape[-1]} as in {name}")
    if 0 in head.shape:
        raise invalid(head_name, f"shape {tuple(head.shape)}", "at least one hidden channel and one entry of the vocabulary")
    return head.shape[0 if transpose_head else 1]


def vocabulary_of(x: ArraySpec, head: ArraySpec | None, transpose_head: bool) -> int:
    """The size of the vocabulary of canonical specs."""
    return x.shape[-1] if head is None else head.shape[1 if transpose_head else 2]


def head_dims(transpose_head: bool) -> str:
    """The dims of a canonical head."""
    return "b? v d" if transpose_head else "b? d v"


def count_rows(x: ArraySpec) -> int:
    return math.prod(x.shape[:-1])


def as_flag(name: str, value: Any) -> bool:
    refuse_traced(name, value, "True or False, known when the program is built")
    if not isinstance(value, bool):
        raise wrong_type(name, repr(value), "a bool")
    return value


def as_labels(name: str, targets: Any, rows: tuple[int, ...]) -> Any:
    """Labels int32 of the rows' shape."""
    if not hasattr(targets, "dtype") or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise wrong_type(name, getattr(targets, "dtype", type(targets).__name__), "integers")
    if tuple(targets.shape) != rows:
        raise invalid(name, f"shape {tuple(targets.shape)}", f"{rows}, one label for each row")
    return as_int32(targets)

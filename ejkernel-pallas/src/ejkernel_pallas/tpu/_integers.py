"""Division of non-negative integers on the scalar unit. Python's operators handle signs, which lowers differently per kind of
TPU."""

from __future__ import annotations

from typing import Any

import jax


def quotient(value: Any, by: int) -> Any:
    return jax.lax.div(value, jax.lax.full_like(value, by))


def remainder(value: Any, by: int) -> Any:
    return jax.lax.rem(value, jax.lax.full_like(value, by))


def quotient_up(value: Any, by: int) -> Any:
    return quotient(value + (by - 1), by)

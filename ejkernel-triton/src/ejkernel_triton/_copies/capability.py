"""What every kernel that moves copies of tokens can run."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_CHOICES = 32
"""Copies of a token are unrolled."""
MAX_COUNT = 2**31 - 2**16
"""Copies and programs have 32-bit indices, elements 64-bit offsets."""


def moving_problem(
    batch: int, choices: ArraySpec, width: int, floats: Mapping[str, ArraySpec | None], target: Target
) -> str | None:
    """Why copies `[b, t, k]` of rows of this width cannot be moved; None if they can."""
    _, tokens, k = choices.shape
    if k > MAX_CHOICES:
        return f"{k} experts of a token are more than {MAX_CHOICES}"
    programs = batch * tokens * max(k, -(-width // 256))
    if programs > MAX_COUNT:
        return f"{programs} copies or tiles are more than {MAX_COUNT}"
    return refusal(target, floats)

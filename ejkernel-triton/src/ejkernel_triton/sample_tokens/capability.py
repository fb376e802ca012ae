"""Which calls of `sample_tokens` this kernel runs."""

from __future__ import annotations

from ejkernel.operations.sample_tokens.interface import SampleTokensCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal

MAX_ROWS = 2**31 - 1
MAX_ENTRIES = 2**24
"""Tokens are counted in float32."""


def supports_forward(call: SampleTokensCall, target: Target) -> str | None:
    batch, rows, entries = call.logits.shape
    if batch * rows > MAX_ROWS:
        return f"{batch * rows} rows are more than {MAX_ROWS}"
    if entries > MAX_ENTRIES:
        return f"{entries} tokens are more than {MAX_ENTRIES}"
    return refusal(target, {"logits": call.logits})

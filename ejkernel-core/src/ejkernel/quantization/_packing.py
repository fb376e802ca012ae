"""Codes of 1 to 32 bits in a little-endian stream of uint32 words: code i takes bits `i * bits` to `(i + 1) * bits` of its row.

This is the packing of MLX; widths that do not divide 32 leave no gaps, and only the last word of a row may have unused bits.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid
from ejkernel.quantization.format import WORD
from ejkernel.utils.checks import check_array


def pack_codes(codes: Any, bits: int) -> Any:
    """Pack the last axis.

    Args:
        codes: `[..., n]`, integers below `2**bits`.
        bits: 1 to 32.

    Returns:
        uint32 `[..., ceil(n * bits / 32)]`; unused bits of the last word are 0.
    """
    _check(codes, "codes", bits)
    count = codes.shape[-1]
    period, words = _period(bits)
    codes = jnp.pad(codes.astype(jnp.uint32), [(0, 0)] * (codes.ndim - 1) + [(0, -count % period)])
    codes = codes.reshape(*codes.shape[:-1], -1, period)
    first = np.arange(period) * bits
    packed: list[Any] = []
    for word in range(words):
        total = jnp.zeros(codes.shape[:-1], jnp.uint32)
        for index in range(period):
            shift = int(first[index]) - word * WORD
            if -bits < shift < WORD:
                code = codes[..., index]
                total = total | (code << shift if shift >= 0 else code >> -shift)
        packed.append(total)
    stream = jnp.stack(packed, -1).reshape(*codes.shape[:-2], -1)
    return stream[..., : -(-count * bits // WORD)]


def unpack_codes(words: Any, bits: int, count: int) -> Any:
    """Undo `pack_codes`.

    Args:
        words: uint32 `[..., ceil(count * bits / 32)]`.
        bits: 1 to 32.
        count: codes per row.

    Returns:
        uint32 `[..., count]`.
    """
    _check(words, "words", bits)
    if words.shape[-1] != -(-count * bits // WORD):
        raise invalid(
            "words", f"{words.shape[-1]} words", f"{-(-count * bits // WORD)} = ceil(count * bits / 32) for {count} codes"
        )
    period, per_period = _period(bits)
    words = words.astype(jnp.uint32)
    words = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, -words.shape[-1] % per_period)])
    words = words.reshape(*words.shape[:-1], -1, per_period)
    codes = jnp.concatenate([_codes_from(words, word, bits, period) for word in range(per_period)], axis=-1)
    codes = codes & np.uint32((1 << bits) - 1)
    return codes.reshape(*codes.shape[:-2], -1)[..., :count]


def _codes_from(words: Any, word: int, bits: int, period: int) -> Any:
    """The codes that start in this word of every period, with what lies above them; the last one may go on in the next word."""
    starts = np.arange(period) * bits - word * WORD
    shifts = starts[(starts >= 0) & (starts < WORD)].astype(np.uint32)
    codes = words[..., word : word + 1] >> shifts.reshape(*[1] * (words.ndim - 1), -1)
    if shifts[-1] + bits <= WORD:
        return codes
    rest = words[..., word + 1 : word + 2] << np.uint32(WORD - shifts[-1])
    return jnp.concatenate([codes[..., :-1], codes[..., -1:] | rest], axis=-1)


def _period(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole words, and how many words."""
    common = math.gcd(bits, WORD)
    return WORD // common, bits // common


def _check(values: Any, name: str, bits: int) -> None:
    check_array(name, values, floating=False)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise invalid(name, f"dtype {values.dtype}", "integers")
    if values.ndim < 1:
        raise invalid(name, "shape ()", "at least one axis")
    if not 1 <= bits <= WORD:
        raise invalid("bits", bits, "1 to 32")

"""`quantized_matmul` with rows in groups, in Triton on a GPU: numbers of every config, then times beside XLA and `ragged_dot`.

    python tests/device/quantized_experts.py --out results

As `quantized_matmul.py`, with its options. Numbers: every format in both layouts, and every config of the search spaces for few,
some and many rows of a matrix, with empty groups and rows past the sum that hold NaN. Times: 64 experts of 2048 x 1408 and 8 of
4096 x 14336, rows as a router would spread them; `plain` is `jax.lax.ragged_dot` with bfloat16 weights. TB/s counts experts that
have rows. Writes `quantized_experts.json`.
"""

from __future__ import annotations

import sys

import numpy as np
from quantized_matmul import BOTH, FORMATS, Shape, main


def spread(rows: int, experts: int) -> tuple[int, ...]:
    """As many experts as rows while there are enough, otherwise at random: one token's choices differ, those of many do not."""
    rng = np.random.default_rng(rows)
    if rows <= min(experts, 8):
        return tuple(np.bincount(rng.permutation(experts)[:rows], minlength=experts).tolist())
    return tuple(rng.multinomial(rows, np.full(experts, 1 / experts)).tolist())


def _timed(name: str, rows: int, experts: int, sizes: tuple[int, int], *, transpose: bool = False) -> Shape:
    phases = BOTH if name == "affine4" and not transpose else ("forward",)
    return Shape(rows, *sizes, *FORMATS[name], transpose=transpose, phases=phases, sizes=spread(rows, experts))


LAYERS = {"64x2048x1408": (64, (2048, 1408)), "8x4096x14336": (8, (4096, 14336))}
PROBLEMS = {
    **{
        f"{name}-{rows}-{layer}": _timed(name, rows, *sizes)
        for layer, sizes in LAYERS.items()
        for rows in (8, 64, 4096)
        for name in ("affine4", "mxfp4", "affine8")
    },
    **{
        f"affine4-{rows}-{layer}-transposed": _timed("affine4", rows, *sizes, transpose=True)
        for layer, sizes in LAYERS.items()
        for rows in (8, 64, 4096)
    },
}


def numbers(small: bool) -> list[tuple[str, Shape, int]]:
    """Rows past the sum, empty groups, tiles that are not full; every config where a search space differs."""
    long, short = (96, 24) if small else (1152, 360)
    every = 0 if small else 99
    found = []
    for transpose in (False, True):
        sizes, suffix = (long, short) if transpose else (short, long), "-transposed" if transpose else ""

        drawn = [(name, 7, (1, 0, 4, 0, 1)) for name in (("affine4-g32", "mxfp4") if small else FORMATS)]
        if not small:
            drawn += [("affine4", 200, (1, 90, 0, 100, 5)), *((name, 600, (1, 320, 0, 270)) for name in ("affine4", "mxfp4"))]
        for name, rows, groups in drawn:
            shape = Shape(rows, *sizes, *FORMATS[name], transpose=transpose, sizes=groups)
            found.append((f"{name}-rows-{rows}{suffix}", shape, every if name == "affine4" or rows > 7 else 0))
    return found


if __name__ == "__main__":
    sys.exit(main("quantized_experts", __doc__, PROBLEMS, numbers))

"""The areas that `orders.py --only` names: the grids of each, in which the most telling problems come first."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import order_problems as of
from order_grid import Grid, Problem, between
from recurrence_problems import Shape


def with_flag(maker: Callable[..., Problem], name: str) -> Callable[..., Problem]:
    """The last parameter is a flag."""
    return lambda *given: maker(*given[:-1], **{name: given[-1]})


def _of_rows(maker: Callable[..., Problem], first: tuple[tuple[int, int], ...] = of.ROWS) -> Grid:
    return Grid(maker, first, of.some_rows, (5, 64))


_LOGITS = ((8192, of.VOCABULARY), (64, of.VOCABULARY), (16384, 32000), (1024, 50257))
_UNITS = ((16384, 14336, "silu", False), (16, 14336, "silu", False), (4096, 4096, "gelu", True), (256, 14336, "silu", True))
_FORMS = ("top_k top_p", "top_k", "plain")
_SAMPLES = tuple((count, of.VOCABULARY, form) for form in _FORMS for count in (1, 16, 64, 4, 32, 256, 128))
_QUANTIZED = tuple(
    (count, *size, form, transpose)
    for form, transpose in ((of.FORMS[0], False), (of.FORMS[1], True), (of.FORMS[2], False), (of.FORMS[3], True))
    for size in ((4096, 14336), (14336, 4096))
    for count in (1, 16, 64, 512, 4096)
)
_LINEAR = tuple(
    (count, *size)
    for count in (1, 16, 64, 4)
    for size in ((4096, 28672, "norm silu"), (4096, 6144, "norm"), (14336, 4096, "residual"), (2048, 2048, ""))
)
AREAS: dict[str, tuple[Grid, ...]] = {
    "attention": (Grid(of.attention, of.ATTENTION, of.some_attention, (1, 32, (4, 2), 16, "causal")),),
    "pages": (
        Grid(of.pages, of.DECODE, of.some_pages, ("2 x 1", 20, 64, (4, 2), 16, 16)),
        Grid(of.pages, of.PREFILL, of.some_pages, ("1 x 8, 2 x 1", 32, 32, (4, 2), 16, 16)),
    ),
    "norms": (
        *(_of_rows(functools.partial(of.norm, operation)) for operation in ("rms_norm", "add_rms_norm", "layer_norm")),
        Grid(functools.partial(of.turned, normed=True), of.TURNED, of.some_turned, (1, 8, (4, 2), 16)),
    ),
    "rope": (Grid(functools.partial(of.turned, normed=False), of.TURNED, of.some_turned, (1, 8, (4, 2), 16)),),
    "softmax": (_of_rows(of.softmax, (*of.ROWS[:6], (1024, of.VOCABULARY), (64, of.VOCABULARY))),),
    "glu": (
        Grid(
            with_flag(of.unit, "together"),
            _UNITS,
            lambda g: (*of.some_rows(g), "silu", g.random() < 0.5),
            (4, 32, "silu", False),
        ),
    ),
    "cross_entropy": (Grid(of.loss, _LOGITS, of.some_logits, (8, 100)),),
    "linear_cross_entropy": (Grid(of.hidden_loss, of.HIDDEN, of.some_head, (32, 16, 100)),),
    "kl": (
        Grid(
            of.divergence,
            tuple((one, 0, classes) for one, classes in _LOGITS[1:]),
            lambda g: (512, 0, of.some_logits(g)[1]),
            (8, 0, 100),
        ),
        Grid(of.divergence, ((2048, 2048, 32000), (1024, 4096, of.VOCABULARY)), of.some_head, (32, 16, 100)),
    ),
    "logprobs": (
        Grid(
            of.logprobs,
            tuple((one, 0, classes) for one, classes in _LOGITS),
            lambda g: (512, 0, of.some_logits(g)[1]),
            (8, 0, 100),
        ),
        Grid(of.logprobs, of.HIDDEN[:3], of.some_head, (32, 16, 100)),
    ),
    "sample": (
        Grid(of.sample, _SAMPLES, lambda g: (between(g, 1, 256), of.some_logits(g)[1], g.choice(_FORMS)), (3, 100, _FORMS[0])),
    ),
    "grouped": (Grid(of.grouped, of.GROUPS, of.some_groups, (16, 2, 32, 32)),),
    "quantized": (
        Grid(
            with_flag(of.quantized, "transpose"),
            _QUANTIZED,
            lambda g: (*of.some_quantized(g), g.random() < 0.5),
            (4, 64, 128, of.FORMS[0], False),
        ),
    ),
    "scaled": (
        Grid(
            of.scaled,
            ((16, 4096, 14336), (4096, 4096, 14336), (512, 4096, 4096)),
            lambda g: of.some_linear(g)[:3],
            (16, 32, 32),
        ),
    ),
    "float8": (
        Grid(
            with_flag(of.float8, "transposed"),
            ((16384, 4096, True), (16384, 4096, False), (64, 4096, False), (4096, 14336, True)),
            lambda g: (between(g, 16, 16384, 16), between(g, 512, 16384, 16), g.random() < 0.5),
            (32, 64, True),
        ),
    ),
    "fused_linear": (Grid(of.linear, _LINEAR, of.some_linear, (4, 32, 64, "norm silu")),),
    "conv": (
        Grid(
            with_flag(of.convolution, "documents"),
            (
                (2, 4096, 4096, False),
                (1, 8192, 8192, True),
                (64, 4, 4096, False),
                (4, 2048, 1536, False),
                (1, 512, 4096, False),
            ),
            lambda g: (g.choice([1, 2, 4]), between(g, 64, 8192), between(g, 512, 8192, 64), False),
            (1, 16, 32, False),
        ),
    ),
    "recurrences": (Grid(of.recurrence, of.RECURRENCES, of.some_recurrence, ("gated", Shape(1, 64, 2, 64))),),
    "steps": (Grid(of.recurrence, of.STEPS, of.some_step, ("mamba2", Shape(2, 1, 2, 64))),),
    "moe": (Grid(of.expert, of.EXPERTS, of.some_experts, ("permute", 20, 8, 2, 24)),),
    "others": (
        Grid(of.pooling, ((8, 8192, 32, 128), (2, 1024, 8, 128)), lambda g: (2, between(g, 256, 8192), 8, 128), (1, 64, 2, 8)),
        Grid(
            of.orthogonal,
            ((1, 4096, 4096, "bfloat16"), (1, 2048, 8192, "bfloat16"), (8, 512, 512, "bfloat16"), (1, 2048, 2048, "float32")),
            lambda g: (g.choice([1, 4]), between(g, 256, 4096, 64), between(g, 256, 4096, 64), "bfloat16"),
            (1, 16, 32, "bfloat16"),
        ),
        Grid(
            of.stored,
            ((64, 1000, 16, 8, 128), (1, 1000, 16, 8, 128), (256, 1000, 64, 8, 128)),
            lambda g: (between(g, 1, 256), between(g, 100, 4000), 16, 8, 128),
            (2, 20, 16, 2, 16),
        ),
        Grid(
            of.sparse,
            ((8192, (64, 4), 128), (2048, (64, 4), 128)),
            lambda g: (between(g, 1024, 8192, 64), (64, 4), 128),
            (128, (32, 2), 16),
        ),
    ),
}


def problems(areas: list[str], seed: int, more: int, *, small: bool = False) -> list[Problem]:
    """In turn of every grid of the areas, none twice."""
    grids = [(area, place, grid) for area in areas for place, grid in enumerate(AREAS[area])]
    if small:
        return [grid.problem(*grid.small) for _, _, grid in grids]
    lists = [list(grid.problems(random.Random(f"{seed} {area} {place}"), more)) for area, place, grid in grids]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*lists))
    return list({(one.function, one.name): one for one in turns if one is not None}.values())

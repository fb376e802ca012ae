"""`delta_rule` on random problems: shapes, heads, decays, forms, segments, packed lengths, dtypes, configs and `vmap`."""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import strategies as st

from ejkernel.operations.delta_rule.cases import arrays as made
from ejkernel_xla.delta_rule.config import DeltaRuleConfig


class Drawn(NamedTuple):
    """Arguments of `canonicalise`."""

    arrays: dict[str, Any]
    options: dict[str, Any]


@st.composite
def problems(draw: Any, *, poison: bool = True) -> Drawn:
    length = draw(st.sampled_from((0, 1, 2, 9, 17)))
    batch, heads = draw(st.sampled_from(((1, 2), (2, 1))))
    pack = draw(st.sampled_from(("", "", "ids", "bounds")))
    rng = np.random.default_rng(draw(seeds))
    ids = bounds = None
    if pack == "ids":
        ids = tuple(int(i) for i in np.repeat(rng.integers(-1, 3, length), rng.integers(1, 5, length))[:length])
    if pack == "bounds":
        batch, bounds = 1, tuple(sorted(int(i) for i in rng.integers(0, length + 1, 3)))
        bounds = (0, *bounds)
    low_rank = draw(st.sampled_from(("", "", "ab", "a", "b")))
    make = made(
        batch,
        length,
        heads,
        width=4,
        channels=draw(st.sampled_from((3, 4))),
        query_heads=draw(st.sampled_from((1, heads, 2 * heads))),
        key_heads=draw(st.sampled_from((1, heads))),
        beta=draw(st.booleans()),
        decay=draw(st.sampled_from(("", "head", "channel"))),
        low_rank=low_rank,
        state=draw(st.booleans()),
        ids=ids,
        bounds=bounds,
        poison=poison,
    )
    options = {
        "softmax_scale": draw(maybe(st.sampled_from((-0.5, 0.0, 1.0)))),
        "use_qk_l2norm": draw(st.booleans()),
        "use_chunked": draw(st.sampled_from((True, True, False))),
        "reverse": draw(st.booleans()),
        "return_state": draw(st.booleans()),
    }
    return Drawn(dict(make(rng)), options)


configs = st.builds(DeltaRuleConfig, st.sampled_from((1, 4, 16, 64)), st.sampled_from((1, 2, 8)))


def check(drawn: Drawn, dtype: str, config: DeltaRuleConfig) -> None:
    check_problem("delta_rule", *drawn, dtype, config=config)


@FEW
@hypothesis.given(problems(), dtypes, configs)
def test_few_problems(drawn: Drawn, dtype: str, config: DeltaRuleConfig) -> None:
    check(drawn, dtype, config)


@pytest.mark.slow
@MANY
@hypothesis.given(problems(), dtypes, configs)
def test_many_problems(drawn: Drawn, dtype: str, config: DeltaRuleConfig) -> None:
    check(drawn, dtype, config)


@st.composite
def mapped(draw: Any) -> tuple[Drawn, dict[str, int | None]]:
    drawn = draw(problems(poison=False))
    return drawn, draw(mapped_axes(drawn.arrays))


@hypothesis.settings(FEW, max_examples=3)
@hypothesis.given(mapped())
def test_few_vmaps(drawn: tuple[Drawn, dict[str, int | None]]) -> None:
    check_vmap("delta_rule", *drawn[0], drawn[1])


@pytest.mark.slow
@hypothesis.settings(MANY, max_examples=100)
@hypothesis.given(mapped())
def test_many_vmaps(drawn: tuple[Drawn, dict[str, int | None]]) -> None:
    check_vmap("delta_rule", *drawn[0], drawn[1])

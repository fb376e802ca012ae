"""Random problems of `rwkv4` on XLA against the float64 reference."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, seeds
from hypothesis import strategies as st

from ejkernel.operations.rwkv4.cases import arrays as drawn
from ejkernel_xla.rwkv4.config import Rwkv4Config

configs = st.sampled_from((Rwkv4Config(1), Rwkv4Config(4, unroll=3), Rwkv4Config(16)))


@st.composite
def problems(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of any length and options."""
    make = drawn(
        batch=draw(st.sampled_from((1, 2))),
        length=draw(st.sampled_from((0, 1, 7, 12))),
        channels=draw(st.sampled_from((1, 3))),
        state=draw(st.booleans()),
        magnitude=draw(st.sampled_from((0.5, 2.0))),
        shift=draw(st.sampled_from((0.0, 4.0))),
    )
    return dict(make(np.random.default_rng(draw(seeds)))), {"return_state": draw(st.booleans())}


def check_mapped(data: Any) -> None:
    arrays, options = data.draw(problems())
    check_vmap("rwkv4", arrays, options, data.draw(mapped_axes(arrays)), size=2)


@FEW
@hypothesis.given(problems(), dtypes, configs)
def test_random_problems(problem: Any, dtype: str, config: Rwkv4Config) -> None:
    check_problem("rwkv4", *problem, dtype, config=config)


@FEW
@hypothesis.given(st.data())
def test_random_vmap(data: Any) -> None:
    check_mapped(data)


@pytest.mark.slow
@MANY
@hypothesis.given(problems(), dtypes, configs)
def test_many_problems(problem: Any, dtype: str, config: Rwkv4Config) -> None:
    check_problem("rwkv4", *problem, dtype, config=config)


@pytest.mark.slow
@hypothesis.settings(MANY, max_examples=60)
@hypothesis.given(st.data())
def test_many_vmaps(data: Any) -> None:
    check_mapped(data)

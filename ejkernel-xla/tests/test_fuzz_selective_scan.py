"""Random problems of `selective_scan` on XLA against the float64 reference."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, seeds
from hypothesis import strategies as st

from ejkernel.operations.selective_scan.cases import arrays as drawn
from ejkernel_xla.selective_scan.config import SelectiveScanConfig

configs = st.sampled_from(
    (
        SelectiveScanConfig(1),
        SelectiveScanConfig(4, unroll=3),
        SelectiveScanConfig(16),
        SelectiveScanConfig(4, associative=True),
        SelectiveScanConfig(16, associative=True),
    )
)


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    """Arrays of any length, with and without skip connection and state, decays from slow to immediate."""
    make = drawn(
        batch=draw(st.sampled_from((1, 2))),
        length=draw(st.sampled_from((0, 1, 7, 12))),
        channels=draw(st.sampled_from((1, 3))),
        width=draw(st.sampled_from((1, 4))),
        skip=draw(st.booleans()),
        state=draw(st.booleans()),
        rate=draw(st.sampled_from((1e-2, 1.0, 30.0))),
    )
    return dict(make(np.random.default_rng(draw(seeds))))


def check_mapped(data: Any) -> None:
    arrays = data.draw(problems())
    check_vmap("selective_scan", arrays, {}, data.draw(mapped_axes(arrays)), size=2)


@FEW
@hypothesis.given(problems(), dtypes, configs)
def test_random_problems(arrays: dict[str, Any], dtype: str, config: SelectiveScanConfig) -> None:
    check_problem("selective_scan", arrays, {}, dtype, config=config)


@FEW
@hypothesis.given(st.data())
def test_random_vmap(data: Any) -> None:
    check_mapped(data)


@pytest.mark.slow
@MANY
@hypothesis.given(problems(), dtypes, configs)
def test_many_problems(arrays: dict[str, Any], dtype: str, config: SelectiveScanConfig) -> None:
    check_problem("selective_scan", arrays, {}, dtype, config=config)


@pytest.mark.slow
@hypothesis.settings(MANY, max_examples=60)
@hypothesis.given(st.data())
def test_many_vmaps(data: Any) -> None:
    check_mapped(data)

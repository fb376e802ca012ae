"""Random problems of `linear_recurrence` on XLA against the float64 reference."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import strategies as st

from ejkernel.operations.linear_recurrence.cases import arrays as drawn
from ejkernel_xla.linear_recurrence.config import LinearRecurrenceConfig

_DECAYS = ("", "g", "gamma", "gk", "gv", "g gamma", "g gk", "gamma gk gv", "g gv")
_HEADS = (
    {"heads": 2},
    {"heads": 1, "query_heads": 2},
    {"heads": 1, "value_heads": 3},
    {"heads": 1, "value_heads": 2, "query_heads": 2},
)
configs = st.sampled_from([LinearRecurrenceConfig(*sizes) for sizes in ((1, 1), (4, 2), (8, 8), (64, 16), (4, 4, True))])


@st.composite
def problems(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and options: any decays together, factors, groups of heads on either side, packed or not, either direction."""
    length = draw(st.sampled_from((0, 1, 5, 11)))
    bounds = draw(maybe(st.lists(st.integers(0, length), min_size=0, max_size=3))) if draw(st.booleans()) else None
    sizes = {
        **draw(st.sampled_from(_HEADS)),
        "batch": 1 if bounds is not None else draw(st.sampled_from((1, 2))),
        "length": length,
        "width": draw(st.sampled_from((1, 3))),
        "channels": draw(st.sampled_from((1, 2))),
        "decays": draw(st.sampled_from(_DECAYS)),
        "bonus": draw(st.booleans()),
        "value_scale": draw(st.booleans()),
        "skip": draw(st.sampled_from(("", "head", "channel"))),
        "state": draw(st.booleans()),
        "bounds": None if bounds is None else (0, *sorted(bounds)),
    }
    options = {
        "return_state": draw(st.booleans()),
        "reverse": draw(st.booleans()),
        "softmax_scale": draw(st.sampled_from((None, 0.5))),
    }
    return dict(drawn(**sizes)(np.random.default_rng(draw(seeds)))), options


def check(problem: tuple[dict[str, Any], dict[str, Any]], dtype: str, config: LinearRecurrenceConfig) -> None:
    check_problem("linear_recurrence", *problem, dtype, config=config)


def check_mapped(data: Any) -> None:
    arrays, options = data.draw(problems())
    arrays = {name: np.nan_to_num(value, nan=1.0) if value.dtype.kind == "f" else value for name, value in arrays.items()}
    axes = data.draw(mapped_axes({name: value for name, value in arrays.items() if name != "cu_seqlens"}))
    axes = {name: axes.get(name) for name in arrays}
    check_vmap("linear_recurrence", arrays, options, axes, size=2)


@FEW
@hypothesis.given(problems(), dtypes, configs)
def test_random_problems(problem: Any, dtype: str, config: LinearRecurrenceConfig) -> None:
    check(problem, dtype, config)


@FEW
@hypothesis.given(st.data())
def test_random_vmap(data: Any) -> None:
    check_mapped(data)


@pytest.mark.slow
@MANY
@hypothesis.given(problems(), dtypes, configs)
def test_many_problems(problem: Any, dtype: str, config: LinearRecurrenceConfig) -> None:
    check(problem, dtype, config)


@pytest.mark.slow
@hypothesis.settings(MANY, max_examples=60)
@hypothesis.given(st.data())
def test_many_vmaps(data: Any) -> None:
    check_mapped(data)

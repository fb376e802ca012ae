"""`quantized_matmul` on random problems: layouts, formats, groups, sizes, dtypes and blocks, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import given, strategies as st

from ejkernel.operations.quantized_matmul.cases import packed
from ejkernel_xla.quantized_matmul.config import QuantizedMatmulConfig

_FIXED = (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16), ("nvfp8", 8, 16))


@dataclasses.dataclass(frozen=True)
class Drawn:
    arrays: dict[str, Any]
    options: dict[str, Any]
    config: QuantizedMatmulConfig | None


ROWS, GROUPS = st.sampled_from((0, 1, 5)), st.sampled_from((1, 2, 3))


@st.composite
def problems(draw: Any, rows: Any = ROWS, groups: Any = GROUPS) -> Drawn:
    free = st.tuples(st.just("affine"), st.sampled_from((2, 3, 4, 5, 6, 7, 8)), st.sampled_from((5, 16, 32)))
    quantiles = st.tuples(st.just("nf4"), st.just(4), st.sampled_from((16, 32)))
    mode, bits, group = draw(st.one_of(free, free, quantiles, st.sampled_from(_FIXED)))
    transpose, columns, other = draw(st.booleans()), group * draw(groups), draw(st.sampled_from((1, 9, 40)))
    rng = np.random.default_rng(draw(seeds))
    inner = columns if transpose else other
    x = (rng.standard_normal((draw(rows), inner)) / inner**0.5).astype(np.float32)
    sizes = st.sampled_from((1, 8, 32, 64)), st.sampled_from((1, 4)), st.sampled_from((1, 3))
    config = draw(maybe(st.builds(QuantizedMatmulConfig, *sizes)))
    options = {"mode": mode, "bits": bits, "group_size": group, "transpose": transpose}
    if not draw(st.booleans()):
        return Drawn({"x": x, **packed(rng, other, columns, mode, bits, group)}, options, config)
    count, offset = draw(st.sampled_from((1, 3))), draw(maybe(st.integers(-1, 2)))
    groups = count if offset is None else count + draw(st.sampled_from((0, 2)))
    used = int(rng.integers(0, len(x) + 1)) if draw(st.booleans()) else len(x)
    ends = np.sort(np.concatenate([[0], rng.integers(0, used + 1, groups - 1), [used]]))
    flat = packed(rng, count * other, columns, mode, bits, group)
    arrays = {"x": x, **{name: value.reshape(count, other, value.shape[1]) for name, value in flat.items()}}
    arrays["group_sizes"] = np.diff(ends).astype(np.int32)
    return Drawn(arrays if offset is None else {**arrays, "group_offset": np.array(offset, np.int32)}, options, config)


def _check(problem: Drawn, dtype: str) -> None:
    check_problem("quantized_matmul", problem.arrays, problem.options, dtype, config=problem.config)


@FEW
@given(problems(), dtypes)
def test_few(problem: Drawn, dtype: str) -> None:
    _check(problem, dtype)


@pytest.mark.slow
@MANY
@given(problems(st.integers(0, 9), st.integers(1, 7)), dtypes)
def test_many(problem: Drawn, dtype: str) -> None:
    _check(problem, dtype)


def _check_vmap(data: Any) -> None:
    problem = data.draw(problems(rows=st.just(3)))
    check_vmap("quantized_matmul", problem.arrays, problem.options, data.draw(mapped_axes(problem.arrays)))


@pytest.mark.slow
@MANY
@given(st.data())
def test_vmap_many(data: Any) -> None:
    _check_vmap(data)


@FEW
@given(st.data())
def test_vmap_few(data: Any) -> None:
    _check_vmap(data)

"""`grouped_matmul` on random problems: sizes, offsets, scales, biases, stored types, dtypes and tiles, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import given, strategies as st

from ejkernel_xla.grouped_matmul.config import GroupedMatmulConfig


@dataclasses.dataclass(frozen=True)
class Drawn:
    arrays: dict[str, Any]
    options: dict[str, Any]
    config: GroupedMatmulConfig | None


ROWS, SIDES = st.sampled_from((1, 13)), st.sampled_from(((8, 5), (1, 1)))


@st.composite
def problems(draw: Any, rows: Any = ROWS, sides: Any = SIDES) -> Drawn:
    rng = np.random.default_rng(draw(seeds))
    count, (inner, columns), total = draw(st.sampled_from((1, 3))), draw(sides), draw(rows)
    offset = draw(maybe(st.integers(-1, 2)))
    groups = count if offset is None else count + draw(st.sampled_from((0, 2)))
    used = int(rng.integers(0, total + 1)) if draw(st.booleans()) else total
    sizes = np.diff(np.sort(np.concatenate([[0], rng.integers(0, used + 1, groups - 1), [used]])))
    transpose = draw(st.booleans())
    shape = (count, columns, inner) if transpose else (count, inner, columns)
    stored = draw(st.sampled_from(("float32", "int8", "float8_e4m3fn")))
    narrow = stored == "float8_e4m3fn" and draw(st.booleans())
    arrays: dict[str, Any] = {
        "lhs": rng.standard_normal((total, inner)).astype(jnp.float8_e5m2 if narrow else np.float32),
        "rhs": _stored(rng.standard_normal(shape) / inner**0.5, stored),
        "group_sizes": sizes.astype(np.int32),
    }
    if offset is not None:
        arrays["group_offset"] = np.array(offset, np.int32)
    if not narrow and draw(st.booleans()):
        arrays["existing_out"] = rng.standard_normal((total, columns)).astype(np.float32)
    scale = draw(st.sampled_from((None, (count,), (count, columns))))
    if scale is not None:
        arrays["rhs_scale"] = rng.standard_normal(scale).astype(np.float32)
    if draw(st.booleans()):
        arrays["bias"] = rng.standard_normal((count, columns)).astype(np.float32)
    row_scale = draw(st.sampled_from((None, (), (total,))))
    if row_scale is not None:
        arrays["lhs_scale"] = np.asarray(rng.standard_normal(row_scale), np.float32)
    config = draw(maybe(st.builds(GroupedMatmulConfig, st.sampled_from((1, 4)), st.sampled_from((1, 3)))))
    options = {"transpose_rhs": transpose, **({"preferred_element_type": "float32"} if narrow else {})}
    return Drawn(arrays, options, config)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    return np.round(8 * values).clip(-127, 127).astype(np.int8) if dtype == "int8" else values.astype(jnp.dtype(dtype))


def _check(problem: Drawn, dtype: str) -> None:
    check_problem("grouped_matmul", problem.arrays, problem.options, dtype, config=problem.config)


@FEW
@given(problems(), dtypes)
def test_few(problem: Drawn, dtype: str) -> None:
    _check(problem, dtype)


@pytest.mark.slow
@MANY
@given(problems(st.integers(0, 40), st.tuples(st.integers(1, 9), st.integers(1, 9))), dtypes)
def test_many(problem: Drawn, dtype: str) -> None:
    _check(problem, dtype)


def _check_vmap(data: Any) -> None:
    problem = data.draw(problems(rows=st.just(13)))
    check_vmap("grouped_matmul", problem.arrays, problem.options, data.draw(mapped_axes(problem.arrays)))


@pytest.mark.slow
@MANY
@given(st.data())
def test_vmap_many(data: Any) -> None:
    _check_vmap(data)


@FEW
@given(st.data())
def test_vmap_few(data: Any) -> None:
    _check_vmap(data)

"""softmax, norms, rope and pooling on random problems, and mapped over random axes."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import strategies as st

sizes = st.sampled_from((0, 1, 3, 16, 130))
widths = st.sampled_from((1, 8, 17, 128))
Drawn = tuple[str, dict[str, Any], dict[str, Any]]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@st.composite
def norms(draw: Any) -> Drawn:
    rng = np.random.default_rng(draw(seeds))
    shape = [*draw(st.lists(sizes, max_size=2)), draw(widths)]
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    shape[-1], shape[axis] = shape[axis], shape[-1]
    hypothesis.assume(shape[axis] > 0)
    arrays = {"x": normal(rng, *shape) + draw(st.sampled_from((0.0, 2.0)))}
    for name in ("scale", "offset"):
        if draw(st.booleans()):
            arrays[name] = normal(rng, shape[axis])
    options = {"axis": axis, "epsilon": draw(st.sampled_from((1e-6, 1e-3)))}
    if "scale" in arrays:
        options["scale_offset"] = draw(st.sampled_from((0.0, 1.0)))
    name = draw(st.sampled_from(("rms_norm", "layer_norm", "add_rms_norm")))
    if name == "add_rms_norm":
        arrays.pop("offset", None)
        arrays["residual"] = normal(rng, *shape)
    return name, arrays, options


@st.composite
def softmaxes(draw: Any) -> Drawn:
    rng = np.random.default_rng(draw(seeds))
    shape = draw(st.lists(sizes, min_size=1, max_size=3))
    arrays = {"x": 3 * normal(rng, *shape)}
    if draw(st.booleans()):
        where = rng.random([draw(st.sampled_from((1, size))) for size in shape]) < 0.6
        arrays["where"] = where[(0,) * draw(st.integers(0, 1)) if where.shape[0] == 1 else ()]
    axes = st.integers(-len(shape), len(shape) - 1)
    options = {"axis": draw(st.one_of(axes, st.none())), "scale": draw(st.sampled_from((1.0, -0.5, 0.0)))}
    return "softmax", arrays, options


@st.composite
def ropes(draw: Any) -> Drawn:
    rng = np.random.default_rng(draw(seeds))
    batch, length, heads = draw(st.integers(1, 2)), draw(sizes), draw(st.integers(1, 3))
    width = draw(st.sampled_from((2, 8, 34)))
    rotary = draw(st.sampled_from((2, width)))
    first = draw(st.booleans())

    def states(heads: int) -> np.ndarray:
        return normal(rng, batch, *((heads, length) if first else (length, heads)), width)

    angles = normal(rng, *draw(st.sampled_from(((batch,), (1,), ()))), length, draw(st.sampled_from((rotary, rotary // 2))))
    arrays = {"query": states(heads), "cos": np.cos(angles), "sin": np.sin(angles)}
    if draw(st.booleans()):
        arrays["key"] = states(1)
    options = {"rotary_dim": rotary, "interleaved": draw(st.booleans()), "layout": "BHTD" if first else "BTHD"}
    if "key" not in arrays or draw(st.booleans()):
        return "rope", arrays, options
    for name in ("query_scale", "key_scale"):
        if draw(st.booleans()):
            arrays[name] = normal(rng, width)
    if "query_scale" in arrays and "key_scale" in arrays:
        options["scale_offset"] = draw(st.sampled_from((0.0, 1.0)))
    return "qk_norm_rope", arrays, {**options, "epsilon": 1e-2}


@st.composite
def poolings(draw: Any) -> Drawn:
    rng = np.random.default_rng(draw(seeds))
    lengths = draw(maybe(st.lists(st.sampled_from((0, 1, 5, 40)), max_size=4)))
    if lengths is None:
        shape = (draw(st.integers(1, 3)), draw(sizes))
        return "mean_pooling", {"x": normal(rng, *shape, *draw(st.sampled_from(((4,), (2, 3)))))}, {}
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    x = normal(rng, 1, int(ends[-1]) + draw(st.integers(0, 3)), 2, 3)
    x[:, ends[-1] :] = np.nan
    return "mean_pooling", {"x": x, "cu_seqlens": ends}, {}


problems = st.one_of(norms(), softmaxes(), ropes(), poolings())


@FEW
@hypothesis.given(problems, dtypes)
def test_random_problems(drawn: Drawn, dtype: str) -> None:
    check_problem(*drawn, dtype)


@pytest.mark.slow
@MANY
@hypothesis.given(problems, dtypes)
def test_many_random_problems(drawn: Drawn, dtype: str) -> None:
    check_problem(*drawn, dtype)


def check_mapped(drawn: Drawn, data: Any) -> None:
    operation, arrays, options = drawn
    check_vmap(operation, arrays, options, data.draw(mapped_axes(arrays)))


@FEW
@hypothesis.given(problems, st.data())
def test_mapped_over_random_axes(drawn: Drawn, data: Any) -> None:
    check_mapped(drawn, data)


@pytest.mark.slow
@MANY
@hypothesis.given(problems, st.data())
def test_mapped_over_many_random_axes(drawn: Drawn, data: Any) -> None:
    check_mapped(drawn, data)

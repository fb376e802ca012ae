"""Random searches of the losses over a vocabulary: shapes, flags, dtypes and tiles; and `vmap` over any axes."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, seeds
from hypothesis import strategies as st

from ejkernel_xla._vocabulary import VocabularyConfig

VOCABULARY, WIDTH = 19, 6
rows = st.sampled_from(((), (7,), (2, 5)))
configs = st.sampled_from((None, VocabularyConfig(3, 8), VocabularyConfig(100, 4), VocabularyConfig(4, 100)))


@st.composite
def cross_entropies(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    shape, head, transposed = draw(rows), draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(seeds))
    x = rng.standard_normal((*shape, WIDTH if head else VOCABULARY)).astype(np.float32) * draw(st.sampled_from((1, 4)))
    targets = rng.integers(-1, VOCABULARY + draw(st.sampled_from((0, 9))), shape).astype(np.int32)
    arrays: dict[str, Any] = {"x": np.where(targets[..., None] == -1, np.float32(np.nan), x), "targets": np.asarray(targets)}
    options = {"logit_softcap": draw(st.sampled_from((None, 3.0))), "sum_logits": draw(st.booleans())}
    if head:
        matrix = rng.standard_normal((WIDTH, VOCABULARY)).astype(np.float32)
        arrays["head"] = matrix.T.copy() if transposed else matrix
        options["transpose_head"] = transposed
        if draw(st.booleans()):
            arrays["head_bias"] = rng.standard_normal(VOCABULARY).astype(np.float32)
    return arrays, options


@st.composite
def sums(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`linear_cross_entropy`: a cross entropy with a head, weighted."""
    arrays, options = draw(cross_entropies().filter(lambda drawn: "head" in drawn[0]))
    rng = np.random.default_rng(draw(seeds))
    del options["sum_logits"]
    if draw(st.booleans()):
        arrays["weights"] = rng.random(arrays["targets"].shape).astype(np.float32)
    options["label_smoothing"], options["z_loss"] = draw(st.sampled_from((0.0, 0.3, 1.0))), draw(st.sampled_from((0.0, 0.01)))
    return arrays, options


@st.composite
def divergences(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    shape, transposed = draw(rows), draw(st.booleans())
    rng = np.random.default_rng(draw(seeds))
    arrays: dict[str, Any] = {}
    valid = rng.random(shape) < 0.7 if draw(st.booleans()) else None
    heads = {"student": draw(st.booleans()), "teacher": draw(st.booleans())}
    for side, head in heads.items():
        x = rng.standard_normal((*shape, WIDTH if head else VOCABULARY)).astype(np.float32)
        arrays[side] = x if valid is None else np.where(valid[..., None], x, np.float32(np.nan))
        if head:
            matrix = rng.standard_normal((WIDTH, VOCABULARY)).astype(np.float32)
            arrays[f"{side}_head"] = matrix.T.copy() if transposed else matrix
    if valid is not None:
        arrays["valid"] = np.asarray(valid)
    direction = draw(st.sampled_from(("forward", "reverse", "jsd")))
    options = {"direction": direction, "temperature": draw(st.sampled_from((1.0, 2.5)))}
    return arrays, {**options, "transpose_heads": transposed and any(heads.values())}


DRAWN = {"cross_entropy": cross_entropies(), "kl_divergence": divergences(), "linear_cross_entropy": sums()}


def search(operation: str, settings: hypothesis.settings) -> None:
    @settings
    @hypothesis.given(DRAWN[operation], dtypes, configs)
    def each(problem: Any, dtype: str, config: Any) -> None:
        check_problem(operation, *problem, dtype, config=config)

    each()


def search_vmap(operation: str, settings: hypothesis.settings) -> None:
    @settings
    @hypothesis.given(st.data())
    def each(data: Any) -> None:
        arrays, options = data.draw(DRAWN[operation])
        arrays = {name: np.nan_to_num(value) if value.dtype == np.float32 else value for name, value in arrays.items()}
        check_vmap(operation, arrays, options, data.draw(mapped_axes(arrays)), size=2)

    each()


@pytest.mark.parametrize("operation", DRAWN)
def test_against_the_reference(operation):
    search(operation, FEW)


@pytest.mark.parametrize("operation", DRAWN)
def test_vmap_over_any_axes(operation):
    search_vmap(operation, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("operation", DRAWN)
def test_against_the_reference_long(operation):
    search(operation, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("operation", DRAWN)
def test_vmap_over_any_axes_long(operation):
    search_vmap(operation, hypothesis.settings(MANY, max_examples=100))

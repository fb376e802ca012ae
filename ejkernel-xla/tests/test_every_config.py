"""Every config of every search space gives the reference's numbers, forward and backward, on random small calls.

The problems are those of the random searches of each operation, with the configs that the implementation itself offers for the
call. Configs that lower to one and the same program are run once; all are lowered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
import test_fuzz_block_sparse_attention as block_sparse
import test_fuzz_delta_rule as delta_rule
import test_fuzz_grouped_matmul as grouped_matmul
import test_fuzz_latent_paged_attention as latent_paged
import test_fuzz_linear_recurrence as linear_recurrence
import test_fuzz_losses as losses
import test_fuzz_native_sparse_attention as native_sparse
import test_fuzz_paged as paged
import test_fuzz_quantized_matmul as quantized_matmul
import test_fuzz_rwkv4 as rwkv4
import test_fuzz_selective_scan as selective_scan
import test_fuzz_sparse_latent_attention as sparse_latent
from fuzzing import FLOOR, dtypes, maybe, seeds
from hypothesis import strategies as st

from ejkernel import kernel_registry
from ejkernel._plugins.records import Candidate
from ejkernel.call.case import Case
from ejkernel.operations.scaled_matmul import cases as scaled_matmul
from ejkernel.plugin import Target, resolve
from ejkernel.testing.problem import Problem
from ejkernel.testing.spaces import check_space
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close

Drawn = tuple[dict[str, Any], dict[str, Any]]
pytestmark = pytest.mark.filterwarnings("ignore:causal. with causal=True the one query")
"""A single query may be drawn, with its alignment left open."""

TARGETS = (Target("cpu"), Target("gpu", "NVIDIA H200", "9.0"), Target("tpu"))


@st.composite
def attention(draw: Any) -> Drawn:
    """Some calls are longer than the smallest tile of the search space."""
    rng = np.random.default_rng(draw(seeds))
    queries, keys = draw(st.sampled_from(((13, 13), (1, 21), (150, 290), (290, 150))))
    key_heads, group = draw(st.sampled_from(((1, 1), (1, 2), (2, 1))))
    shapes = {"query": (queries, key_heads * group), "key": (keys, key_heads), "value": (keys, key_heads)}
    arrays = {name: rng.standard_normal((1, *shape, 4)).astype(np.float32) for name, shape in shapes.items()}
    window = draw(maybe(st.sampled_from(((3, 0), (130, 5)))))
    return arrays, {"causal": draw(st.booleans()), "sliding_window": window, "return_lse": draw(st.booleans())}


@st.composite
def scaled_products(draw: Any) -> Drawn:
    float8 = st.sampled_from(("float8_e4m3fn", "float8_e5m2"))
    left, right = draw(st.one_of(st.tuples(float8, float8), st.just(("int8", "int8"))))
    rows, size = draw(st.sampled_from(((), (0,), (5,), (2, 3)))), st.sampled_from((0, 1, 9, 40))
    transpose, scales = draw(st.booleans()), draw(st.sampled_from(("", "row", "column", "row column")))
    make = scaled_matmul.arrays(rows, draw(size), draw(size), left, right, transpose=transpose, scales=scales)
    options = {"transpose_rhs": transpose, "out_dtype": "float32", "precision": draw(maybe(st.just("default")))}
    return dict(make(np.random.default_rng(draw(seeds)))), options


def both(drawn: Any) -> Drawn:
    return drawn.arrays, drawn.options


PROBLEMS: dict[str, st.SearchStrategy[Drawn]] = {
    "block_sparse_attention": block_sparse.problems().map(both),
    "cross_entropy": losses.cross_entropies(),
    "delta_rule": delta_rule.problems().map(both),
    "flash_attention": attention(),
    "grouped_matmul": grouped_matmul.problems().map(both),
    "kl_divergence": losses.divergences(),
    "latent_paged_attention": latent_paged.problems().map(lambda drawn: drawn[1:]),
    "linear_cross_entropy": losses.sums(),
    "linear_recurrence": linear_recurrence.problems(),
    "native_sparse_attention": native_sparse.calls(),
    "paged_attention": paged.attention(),
    "quantized_matmul": quantized_matmul.problems().map(both),
    "rwkv4": rwkv4.problems(),
    "scaled_matmul": scaled_products(),
    "selective_scan": selective_scan.problems().map(lambda arrays: (arrays, {})),
    "sparse_latent_attention": sparse_latent.calls(),
}

WITH_KNOBS = [
    candidate
    for candidate in kernel_registry.list_implementations()
    if candidate.platform == "xla" and candidate.implementation.configs is not None
]


BACKWARD = {
    (candidate.implementation.operation, candidate.id): candidate
    for candidate in WITH_KNOBS
    if candidate.implementation.phase == "backward"
}


def test_no_implementation_is_left_out() -> None:
    assert {candidate.implementation.operation for candidate in WITH_KNOBS} == PROBLEMS.keys()


def search(examples: int, candidate: Candidate, check: Callable[[Candidate, Problem, int], None]) -> None:
    operation = candidate.implementation.operation

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(PROBLEMS[operation], dtypes, st.integers(0, 11))
    def run(drawn: Drawn, dtype: str, first: int) -> None:
        arrays, options = drawn
        check(candidate, Problem(operation, Case("drawn", lambda _: arrays, options), dtype, candidate.id), first)

    run()


def check_legal(candidate: Candidate, problem: Problem, first: int) -> None:
    space = resolve(candidate.implementation.configs)
    for target in TARGETS:
        call = problem.bound.call
        found = {*check_space(space, call, target)}
        assert found == {*space.search_space(call, target)}, "the heuristic's config is in the space"
        backward = resolve(BACKWARD[candidate.implementation.operation, candidate.id].implementation.configs)
        assert found >= {*check_space(backward, call, target)}, "only configs of forward are checked below"


def check_numbers(candidate: Candidate, problem: Problem, first: int, most: int | None = None) -> None:
    """Every config of the space, or so many different programs, from this place of the space on."""
    request = problem.request()
    configs = check_space(resolve(candidate.implementation.configs), request.call, request.target)
    programs: set[str] = set()
    for place in range(len(configs)):
        config = configs[(first + place) % len(configs)]
        run = jax.jit(functools.partial(outputs_and_gradients, problem, config))
        lowered = run.lower(problem.differentiable, problem.cotangents)
        text = lowered.as_text()
        if text not in programs and len(programs) != most:
            programs.add(text)
            check_results(problem, config, *lowered.compile()(problem.differentiable, problem.cotangents))


def outputs_and_gradients(problem: Problem, config: Any, values: Any, cotangents: Any) -> Any:
    request = problem.request(config)

    def outputs(values: dict[str, Any]) -> Any:
        found = problem.public(request, values)
        return {name: value for name, value in found.items() if name in cotangents}, found

    _, pull, found = jax.vjp(outputs, values, has_aux=True)
    return found, pull(cotangents)[0]


def check_results(problem: Problem, config: Any, outputs: dict[str, Any], gradients: dict[str, Any]) -> None:
    floor, expected = FLOOR[problem.dtype], problem.expected_outputs
    for name, value in outputs.items():
        check_close(f"{name} with {config}", value, getattr(expected, name), FORWARD[problem.dtype], floor)
    assert gradients.keys() == problem.differentiable.keys()
    for name, value in gradients.items():
        wanted = problem.expected_gradients[name]
        check_close(f"gradient of {name} with {config}", value, wanted, GRADIENT[problem.dtype], floor)


def named(candidate: Candidate) -> str:
    return f"{candidate.implementation.operation}-{candidate.id}-{candidate.implementation.phase}"


FORWARD_PHASES = [candidate for candidate in WITH_KNOBS if candidate.implementation.phase == "forward"]


def test_both_phases_have_the_same_knobs() -> None:
    """So that a config given as `cfg=` below reaches both."""
    knobs: dict[Any, set[Any]] = {}
    for candidate in WITH_KNOBS:
        found = resolve(candidate.implementation.configs).config
        knobs.setdefault((candidate.implementation.operation, candidate.id), set()).add(found)
    assert [name for name, found in knobs.items() if len(found) != 1] == []


@pytest.mark.parametrize("candidate", FORWARD_PHASES, ids=named)
def test_spaces_are_legal(candidate: Candidate) -> None:
    search(10, candidate, check_legal)


@pytest.mark.parametrize("candidate", FORWARD_PHASES, ids=named)
def test_few(candidate: Candidate) -> None:
    search(2, candidate, functools.partial(check_numbers, most=2))


@pytest.mark.slow
@pytest.mark.parametrize("candidate", FORWARD_PHASES, ids=named)
def test_many(candidate: Candidate) -> None:
    search(60, candidate, check_numbers)

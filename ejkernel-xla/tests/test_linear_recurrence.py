"""`linear_recurrence` on XLA: its forms agree, packed sequences are sequences, memory does not hold a state per token."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.operations import get_operation
from ejkernel.operations.linear_recurrence.cases import arrays as drawn
from ejkernel.utils.tolerance import Tolerance, check_close
from ejkernel_xla.linear_recurrence.config import LinearRecurrenceConfig

CLOSE = Tolerance(1e-5, 1e-4)
EVERY = "g gamma gk gv"


def problem(seed: int = 0, **sizes: Any) -> dict[str, Any]:
    made = drawn(**{"batch": 2, "heads": 1, "width": 3, "channels": 2, **sizes})(np.random.default_rng(seed))
    return {name: jnp.asarray(value) for name, value in made.items()}


def run(arrays: dict[str, Any], cfg: Any = None, **options: Any) -> Any:
    return get_operation("linear_recurrence").invoke(arrays, {"return_state": True, **options}, platform="xla", cfg=cfg)


def pieces(arrays: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {n: a[:, start:stop] if n in ("query", "key", "value", "g", "gk", "gv") else a for n, a in arrays.items()}


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17])
def test_chunked_equals_step_by_step(length: int) -> None:
    """Chunks of 8 in blocks of 4, one chunk of everything, and calls of one token that hand the state on."""
    arrays = problem(length=length, decays=EVERY, state=True)
    chunked = run(arrays, LinearRecurrenceConfig(8, 4))
    whole = run(arrays, LinearRecurrenceConfig(32, 32))
    state, outs = arrays["initial_state"], []
    step = jax.jit(lambda token, state: run({**token, "initial_state": state}))
    for t in range(length):
        out, state = step(pieces(arrays, t, t + 1), state)
        outs.append(out)
    stepped = (jnp.concatenate(outs, axis=1) if outs else arrays["value"], state)
    for got in (chunked, whole):
        for name, one, other in zip(("out", "state"), got, stepped, strict=True):
            check_close(name, one, other, CLOSE)


def test_reverse_is_the_mirror_image() -> None:
    arrays = problem(length=13, decays=EVERY, bonus=True, state=True)
    mirrored = {n: jnp.flip(a, 1) if a.ndim > 2 and n != "initial_state" else a for n, a in arrays.items()}
    config = LinearRecurrenceConfig(4, 2)
    out, state = run(arrays, config, reverse=True)
    wanted, wanted_state = run(mirrored, config)
    check_close("out", out, jnp.flip(wanted, 1), CLOSE)
    check_close("state", state, wanted_state, CLOSE)


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences_are_sequences(reverse: bool) -> None:
    """Outputs, states and gradients equal those of each sequence alone; one compilation serves other lengths."""
    arrays = problem(batch=1, length=24, decays="g gk", state=True, bounds=(0, 0, 0, 0, 0))
    arrays.pop("cu_seqlens")
    arrays = {n: jax.random.normal(jax.random.key(i), a.shape) for i, (n, a) in enumerate(arrays.items())}
    arrays = {n: -jnp.abs(a) if n in ("g", "gk") else a for n, a in arrays.items()}
    config, traces = LinearRecurrenceConfig(4, 2), []

    def loss(arrays: dict[str, Any], cu_seqlens: Any) -> Any:
        given = arrays if cu_seqlens is None else {**arrays, "cu_seqlens": cu_seqlens}
        out, state = run(given, config, reverse=reverse)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state)), (out, state)

    @jax.jit
    def packed(arrays: dict[str, Any], cu_seqlens: Any) -> Any:
        traces.append(1)
        return jax.value_and_grad(loss, has_aux=True)(arrays, cu_seqlens)

    separate = jax.jit(jax.value_and_grad(functools.partial(loss, cu_seqlens=None), has_aux=True))
    for bounds in ([0, 6, 6, 12, 24], [0, 0, 6, 18, 18], [0, 0, 0, 0, 0])[: 1 if reverse else 3]:
        poisoned = {n: a.at[:, bounds[-1] :].set(jnp.nan) if n != "initial_state" else a for n, a in arrays.items()}
        (_, (out, state)), grads = packed(poisoned, jnp.array(bounds))
        wanted = jnp.zeros_like(out)
        wanted_grads = {n: jnp.zeros_like(a) for n, a in arrays.items()}
        for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
            alone = {**pieces(arrays, start, stop), "initial_state": arrays["initial_state"][i : i + 1]}

            (_, (one, last)), more = separate(alone)
            wanted = wanted.at[:, start:stop].set(one)
            check_close(f"state {i}", state[i], last[0], CLOSE)
            for name, gradient in more.items():
                at = (slice(i, i + 1),) if name == "initial_state" else (slice(None), slice(start, stop))
                wanted_grads[name] = wanted_grads[name].at[at].set(gradient)
        check_close("out", out, wanted, CLOSE)
        for name, gradient in wanted_grads.items():
            check_close(f"gradient of {name}", grads[name], gradient, CLOSE)
    assert len(traces) == 1


@pytest.mark.parametrize("decays", ["gk", "gv", "g"])
def test_strong_decays_cost_weak_ones_nothing(decays: str) -> None:
    """One step of -3000 leaves what follows as exact as if the sequence began there."""
    arrays = problem(batch=1, length=32, decays=decays, rate=0.01)
    strong = {**arrays, decays: arrays[decays].at[:, 5].set(-3000.0)}
    got = run(strong, LinearRecurrenceConfig(32, 16))[0][:, 5:]
    fresh = run(pieces(arrays, 5, 32), LinearRecurrenceConfig(32, 16))[0]
    check_close(decays, got, fresh, Tolerance(5e-7, 2e-6))
    gradients = jax.grad(lambda arrays: jnp.sum(run(arrays, LinearRecurrenceConfig(32, 16))[0]))(strong)
    assert all(bool(jnp.all(jnp.isfinite(gradient))) for gradient in gradients.values())
    assert float(jnp.max(jnp.abs(gradients[decays][:, 5]))) == 0


def test_growth_is_computed_as_it_is() -> None:
    arrays = problem(batch=1, length=12, decays="gk gv", rate=-0.2)
    out = run(arrays, LinearRecurrenceConfig(8, 4))[0]
    state, wanted = np.zeros((3, 2)), []
    q, k, v, gk, gv = (np.asarray(arrays[n], np.float64)[0, :, 0] for n in ("query", "key", "value", "gk", "gv"))
    assert gk.max() > 0
    for t in range(12):
        state = np.exp(gk[t])[:, None] * state * np.exp(gv[t]) + np.outer(k[t], v[t])
        wanted.append(state.T @ q[t] / np.sqrt(3))
    check_close("out", out[0, :, 0], np.stack(wanted), CLOSE)


@pytest.mark.parametrize("decays", ["g", "gk gv"])
def test_memory_holds_no_state_per_token(decays: str) -> None:
    """Per token less than half a state, forward and backward; forward no state per chunk either."""
    heads, width, channels = 2, 64, 64
    state_bytes = 4 * heads * width * channels

    def temporary(length: int, backward: bool) -> int:
        arrays = problem(batch=1, length=length, heads=heads, width=width, channels=channels, decays=decays)

        def value(arrays: dict[str, Any]) -> Any:
            return jnp.sum(run(arrays, LinearRecurrenceConfig(32, 8), return_state=False))

        function = jax.grad(value) if backward else value
        analysis = jax.jit(function).lower(arrays).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    inputs = 4 * heads * (5 * width + 1)
    forward = (temporary(2048, False) - temporary(1024, False)) / 1024
    backward = (temporary(2048, True) - temporary(1024, True)) / 1024
    assert forward < 3 * inputs, forward
    assert backward < 3 * inputs + 2 * state_bytes / 32, backward
    assert backward < state_bytes / 2


def test_groups_are_not_repeated_in_memory() -> None:
    """64 heads of value over one head of query and key: no array of keys per head in the program, forward or backward."""
    heads, length, width = 64, 64, 200
    x, b, c = (jnp.ones((1, length, *shape)) for shape in ((heads, 2), (1, width), (1, width)))

    def total(x: Any, b: Any, c: Any) -> Any:
        return jnp.sum(ejkernel.state_space_v2(x, -jnp.ones(heads), b, c, None, jnp.ones((1, length, heads)))[0])

    text = jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(x, b, c).compile().as_text() or ""
    sizes = {math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([0-9,]+)\]", text)}
    assert max(sizes) < length * heads * width, max(sizes)
    assert length * width in sizes


def test_a_single_step_is_small() -> None:
    """T = 1 has no loop, and no chunk of padding."""
    arrays = problem(length=1, decays="gk", state=True, width=16, channels=16)
    text = jax.jit(run).lower(arrays).as_text()
    assert "while" not in text
    assert "tensor<2x64" not in text


def test_low_precision_states_are_float32() -> None:
    arrays = {n: a.astype(jnp.bfloat16) for n, a in problem(length=300, decays="g").items()}
    out, state = run(arrays)
    wide, wide_state = run({n: a.astype(jnp.float32) for n, a in arrays.items()})
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    check_close("state", state, wide_state, CLOSE)
    check_close("out", out, wide, Tolerance(4e-3, 1e-2))


def test_config_is_checked() -> None:
    with pytest.raises(ValueError, match="chunk_size, block_size: got 24, 16, expected values >= 1, the second a divisor"):
        LinearRecurrenceConfig(24, 16)


def test_a_traced_scale_beside_a_skip_is_refused() -> None:
    """The output takes what a traced scale differs from the default, and would scale what is skipped."""
    arrays = problem(length=5, decays="g", skip="head")
    with pytest.raises(ValueError, match="scale: got a traced number, expected a concrete one beside skip; multiply the query"):
        jax.jit(lambda scale: run(arrays, softmax_scale=scale))(0.5)

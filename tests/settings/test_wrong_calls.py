"""Every public function with arguments that no function takes: refused by the argument's name before anything is computed."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_calls import CALLS

import ejkernel


class Tensor:
    """What another framework's tensor looks like from here."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim, self.dtype = shape, len(shape), "torch.float32"


SETTINGS = {"platform", "cfg", "mesh", "in_specs", "out_specs"}
"""Arguments that `call/policy.py` and `compositions/mesh.py` check."""


def call_with(name: str, argument: str, value: Any) -> Any:
    call = CALLS[name]
    return getattr(ejkernel, name)(**{**call.in_dtype("float32"), **call.options, argument: value})


def refused(name: str, argument: str, value: Any, kinds: Any = (TypeError, ValueError)) -> str:
    with pytest.raises(kinds) as raised:
        call_with(name, argument, value)
    said = str(raised.value)
    assert re.match(rf"{argument}: got .+, expected ", said), said
    return said


def arguments(name: str) -> list[str]:
    parameters = inspect.signature(getattr(ejkernel, name)).parameters
    return [one for one, p in parameters.items() if one not in SETTINGS and p.kind is not p.VAR_KEYWORD]


@pytest.mark.unsampled
@pytest.mark.parametrize("name", CALLS)
def test_no_arrays(name: str) -> None:
    """Lists, words, other frameworks' tensors, and arrays of what are not numbers."""
    for argument, array in CALLS[name].arrays.items():
        wrong = [Tensor(*array.shape), np.full(array.shape, None, object), np.full(array.shape, "x")]
        wrong += [np.zeros(array.shape, "datetime64[s]")]
        if array.ndim:
            wrong += [array.tolist(), tuple(array), "x", {"x": array}]
        for value in wrong:
            refused(name, argument, value, TypeError)


@pytest.mark.unsampled
@pytest.mark.parametrize("name", CALLS)
def test_no_numbers(name: str) -> None:
    """NaN and integers of more than 64 bits, whatever they are given for, and in pairs such as a window too."""
    for argument in arguments(name):
        for value in (float("nan"), np.float32("nan"), np.array(float("nan")), 10**400, -(10**400)):
            refused(name, argument, value, (ValueError, TypeError))
        for value in (Tensor(), np.full((), None, object)):
            refused(name, argument, value, TypeError)


@pytest.mark.parametrize("name", CALLS)
def test_objects_and_containers(name: str) -> None:
    """What cannot be hashed and what is nothing in particular is refused by a sentence, not by an error from inside."""
    for argument in arguments(name):
        for value in (object(), {1, 2}, {"a": 1}, b"x"):
            with pytest.raises((TypeError, ValueError), match=r": got .*, expected ") as raised:
                call_with(name, argument, value)
            assert "\n" not in str(raised.value)


INDICES = [
    (name, argument) for name, call in CALLS.items() for argument, value in call.arrays.items() if value.dtype == np.int32
]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize(("name", "argument"), INDICES)
def test_integers_of_any_type(name: str, argument: str, dtype: Any) -> None:
    call = CALLS[name]
    array = call.arrays[argument]
    if array.size and array.min() < np.iinfo(dtype).min:
        dtype = np.int8
    arrays = call.in_dtype("float32")
    given = array.astype(dtype)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        specs = jax.eval_shape(call.run, arrays)
        assert jax.eval_shape(call.run, {**arrays, argument: given}) == specs


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.uint32, np.int64])
@pytest.mark.parametrize("counts", [False, True])
def test_blocks_of_any_integer_type(counts: bool, dtype: Any) -> None:
    call = CALLS["apply_native_sparse_attention"]
    arrays = call.in_dtype("float32")
    if counts:
        arrays["block_counts"] = jnp.ones((4, 8, 2), jnp.int32)
    changed = "block_counts" if counts else "block_indices"
    wanted = call.run(arrays)
    given = np.asarray(arrays[changed]).astype(dtype)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(call.run({**arrays, changed: given}), wanted)


@pytest.mark.parametrize("name", CALLS)
def test_by_name_or_by_position(name: str) -> None:
    """Every order of saying the same call gives the same canonical call, or the same refusal."""
    call, function = CALLS[name], getattr(ejkernel, name)
    given = {**call.arrays, **call.options}
    kinds = inspect.Parameter
    places = [one for one, p in inspect.signature(function).parameters.items() if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    count = next((index for index, one in enumerate(places) if one not in given), len(places))
    keywords = [one for one, p in inspect.signature(function).parameters.items() if p.kind is kinds.KEYWORD_ONLY]
    for extra in ({}, *({one: "qqq"} for one in keywords if one not in given)):
        outcomes: list[Any] = []
        for by_position in {0, min(1, count), count}:
            named = {one: value for one, value in given.items() if one not in places[:by_position]}
            try:
                found = ejkernel.explain(name, *[given[one] for one in places[:by_position]], **named, **extra)
                outcomes.append(found.forward.call)
            except (TypeError, ValueError) as error:
                outcomes.append((type(error), str(error)))
        assert all(one == outcomes[0] for one in outcomes), (extra, outcomes)


def test_known_settings_of_sampling() -> None:
    logits, key = jnp.zeros((2, 5)), jax.random.key(0)
    for name in ("temperature", "top_p", "min_p"):
        for value in (float("nan"), np.array([0.5, np.nan], np.float32)):
            with pytest.raises(ValueError, match=rf"^{name}: got .*nan"):
                ejkernel.sample_tokens(logits, key, **{name: value})

"""`sample_tokens` on XLA: what is drawn how often, which tokens are kept, what a row depends on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import ejkernel
from ejkernel._pipeline.operation import _invoke  # pyright: ignore[reportPrivateUsage]
from ejkernel.operations.sample_tokens.reference import probabilities
from ejkernel_xla.sample_tokens import kernel

LOGITS = np.asarray(np.random.default_rng(0).standard_normal((8, 24)) * 2, np.float32)
DRAWS = 20000
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 10, "top_p": 0.9, "min_p": 0.05},
}


def _sorted_kept(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The usual way: sort, cut by rank, by the sum of what stands before, by the ratio to the first. Logits are distinct."""
    order = np.argsort(-x, kind="stable")
    weights = np.exp((x[order].astype(np.float64) - x.max()) / temperature)
    kept = np.arange(x.size) < top_k
    shares = np.where(kept, weights, 0) / weights[kept].sum()
    kept &= np.cumsum(shares) - shares < top_p
    kept &= weights >= min_p
    return np.sort(order[kept])


def _drawn(row: np.ndarray, **settings: Any) -> np.ndarray:
    """By many keys, of one row."""
    keys = jax.random.split(jax.random.key(7), DRAWS)
    return np.asarray(ejkernel.sample_tokens(np.broadcast_to(row, (DRAWS, row.size)), keys, platform="xla", **settings))


def _check_frequencies(drawn: Any, expected: np.ndarray | None) -> None:
    """Chi-square, with what is expected fewer than 5 times as one class."""
    assert expected is not None
    counts = np.bincount(np.asarray(drawn), minlength=expected.size)
    assert counts.size == expected.size and not counts[expected == 0].any()
    often = expected * DRAWS >= 5
    observed, wanted = [*counts[often], counts[~often].sum()], [*expected[often], expected[~often].sum()]
    classes = len(wanted) - (wanted[-1] == 0)
    if classes > 1:
        assert stats.chisquare(observed[:classes], np.asarray(wanted[:classes]) * DRAWS).pvalue > 1e-4


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_the_probabilities(name: str) -> None:
    settings = SETTINGS[name]
    _check_frequencies(_drawn(LOGITS[0], **settings), _exact(LOGITS[0], **settings))


def _exact(row: Any, temperature: float = 1.0, **filters: Any) -> np.ndarray | None:
    return probabilities(np.asarray(row, np.float64), temperature, **filters)


@pytest.mark.parametrize("source", ["one key", "folded", "small seeds"])
def test_frequencies_under_one_key_and_by_keys_of_a_sequence(source: str) -> None:
    """Rows of one key are independent draws; so are the steps of a request whose key is folded with the step's number."""
    steps = jnp.arange(DRAWS)
    key = {
        "one key": lambda: jax.random.key(3),
        "folded": lambda: jax.vmap(lambda step: jax.random.fold_in(jax.random.key(5), step))(steps),
        "small seeds": lambda: jax.vmap(jax.random.key)(steps),
    }[source]()
    expected = _exact(LOGITS[1])
    drawn = np.asarray(ejkernel.sample_tokens(np.broadcast_to(LOGITS[1], (DRAWS, LOGITS.shape[1])), key, platform="xla"))
    _check_frequencies(drawn, expected)
    assert expected is not None
    chance = np.sum(expected**2)  # that two independent draws are equal
    assert abs(np.mean(drawn[1:] == drawn[:-1]) - chance) < 5 * np.sqrt(chance / DRAWS)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_tokens_are_those_of_a_sort(static: bool, dtype: str) -> None:
    """Nothing else is drawn, and what is likely among them is; the reference keeps exactly these."""
    rng = np.random.default_rng(2)
    for _ in range(4):
        x = jnp.asarray(rng.permutation(64) * 0.0625 - 2, dtype)  # distinct in bfloat16 too
        settings = (
            float(rng.uniform(0.3, 2)),
            int(rng.integers(1, 40)),
            float(rng.uniform(0.1, 1)),
            float(rng.uniform(0, 0.3)),
        )
        temperature, top_k, top_p, min_p = settings
        kept = _sorted_kept(np.asarray(x, np.float32), *settings)
        keys = jax.random.split(jax.random.key(int(rng.integers(1000))), 4000)
        tokens = ejkernel.sample_tokens(
            jnp.broadcast_to(x, (4000, 64)),
            keys,
            temperature=temperature,
            top_k=top_k if static else jnp.int32(top_k),
            top_p=top_p,
            min_p=min_p,
            platform="xla",
        )
        found = np.unique(np.asarray(tokens))
        assert {*found} <= {*kept}
        weights = np.exp((np.asarray(x, np.float64)[kept] - float(x.max())) / temperature)
        likely = kept[weights / weights.sum() > 0.005]
        assert {*likely} <= {*found}
        exact = probabilities(np.asarray(x, np.float64), *settings)
        assert exact is not None
        np.testing.assert_array_equal(np.flatnonzero(exact), kept)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"temperature": 0.0}], ids=["top-k", "top-p", "cold"])
def test_many_rows_on_a_gpu_keep_what_a_sort_keeps(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A top_k that is an int is found by bisection there; equal logits at its boundary too."""
    logits = jnp.round(2 * jax.random.normal(jax.random.key(3), (400, 97)), 1)
    found: list[Any] = []
    for sorts in (True, False):
        asked: list[Any] = []

        def stand_in(call: Any, sorts: bool = sorts, asked: list[Any] = asked) -> bool:
            asked.append(call)
            return sorts

        monkeypatch.setattr(kernel, "_sorts", stand_in)
        jax.clear_caches()
        found.append(
            ejkernel.sample_tokens(logits, jax.random.key(5), top_k=9, return_logprobs=True, platform="xla", **settings)
        )
        assert asked
    jax.clear_caches()
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("settings", [{"top_k": jnp.int32(7)}, {"top_p": 0.8}, {"top_k": jnp.int32(40), "top_p": 0.3}], ids=str)
def test_thresholds_by_digits_are_those_by_halves(
    dtype: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; with equal logits, zeros of both signs, excluded ones and rows of one value."""
    logits = jnp.round(4 * jax.random.normal(jax.random.key(0), (64, 300)), 1).astype(dtype)
    logits = logits.at[:9, ::3].set(-jnp.inf).at[9].set(0).at[10, ::2].set(-0.0).at[11].set(jnp.finfo(dtype).min)
    found: list[Any] = []
    for search in (kernel._by_digits, kernel._by_halves):  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(kernel, "_smallest_kept", search)
        jax.clear_caches()
        found.append(ejkernel.sample_tokens(logits, jax.random.key(5), return_logprobs=True, platform="xla", **settings))
    jax.clear_caches()
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6, atol=1e-6)


def test_equals_at_a_boundary_are_kept_together() -> None:
    x = jnp.asarray([3.0, 1.0, 1.0, 1.0, 0.0])
    for settings in ({"top_k": 2}, {"top_k": jnp.int32(2)}, {"top_p": 0.8}, {"top_k": 2, "top_p": 0.8}, {"min_p": 0.1}):
        assert {*_drawn(np.asarray(x), **settings)} == {0, 1, 2, 3}, settings


def test_a_row_depends_on_its_key_and_logits_alone() -> None:
    keys = jax.random.split(jax.random.key(11), 8)
    settings: dict[str, Any] = {
        "temperature": jnp.linspace(0.2, 2, 8),
        "top_k": jnp.arange(8),
        "top_p": jnp.linspace(0.3, 1, 8),
    }
    whole = np.asarray(ejkernel.sample_tokens(LOGITS, keys, **settings))
    back = np.asarray(ejkernel.sample_tokens(LOGITS[::-1], keys[::-1], **{n: v[::-1] for n, v in settings.items()}))
    np.testing.assert_array_equal(whole, back[::-1])
    alone = [ejkernel.sample_tokens(LOGITS[i], keys[i], **{n: v[i] for n, v in settings.items()}) for i in range(8)]
    np.testing.assert_array_equal(whole, alone)
    mapped = jax.vmap(lambda x, key, given: ejkernel.sample_tokens(x, key, **given))(LOGITS, keys, settings)
    np.testing.assert_array_equal(whole, mapped)
    one_key = ejkernel.sample_tokens(LOGITS, jax.random.key(4))
    np.testing.assert_array_equal(one_key[:3], ejkernel.sample_tokens(LOGITS[:3], jax.random.key(4)))


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_kind(implementation: str) -> None:
    key = jax.random.key(5, impl=implementation)
    typed = ejkernel.sample_tokens(LOGITS, key)
    np.testing.assert_array_equal(typed, ejkernel.sample_tokens(LOGITS, jax.random.key_data(key)))
    keys = jax.random.split(key, 8)
    np.testing.assert_array_equal(
        ejkernel.sample_tokens(LOGITS, keys), ejkernel.sample_tokens(LOGITS, jax.random.key_data(keys))
    )
    many = [ejkernel.sample_tokens(np.zeros(1000, np.float32), key) for key in keys]
    assert len({int(token) for token in many}) > 5


def test_other_settings_are_no_other_program() -> None:
    sizes = []
    for temperature, top_p, top_k in ((0.5, 0.9, 3), (1.0, 0.5, 7)):
        ejkernel.sample_tokens(LOGITS, jax.random.key(1), temperature=temperature, top_p=top_p, top_k=np.array(top_k))
        sizes.append(_invoke._cache_size())  # pyright: ignore
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("by", ["logits", "temperature"])
def test_differentiating_is_refused(by: str) -> None:
    given: dict[str, Any] = {"logits": jnp.asarray(LOGITS), "temperature": jnp.float32(1)}

    def loss(value: Any) -> Any:
        _, logprobs = ejkernel.sample_tokens(**{**given, by: value}, key=jax.random.key(0), return_logprobs=True)
        return jnp.sum(logprobs)

    with pytest.raises(TypeError, match=rf"{by}: it has no gradient; pass jax.lax.stop_gradient\({by}\)"):
        jax.grad(loss)(given[by])
    assert not jax.grad(lambda value: loss(jax.lax.stop_gradient(value)))(given[by]).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"temperature: got -1.0, expected a value in \[0, inf\]"),
        ({"top_p": 1.5}, r"top_p: got 1.5, expected a value in \[0, 1\]"),
        ({"min_p": np.full(8, -0.5)}, r"min_p: .*expected values in \[0, 1\]"),
        ({"top_k": 0}, "top_k: got 0, expected an int of at least 1; None keeps every token"),
    ],
)
def test_known_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ejkernel.sample_tokens(LOGITS, jax.random.key(0), **settings)


def test_a_constrained_row_gives_only_what_the_mask_admits() -> None:
    mask = np.zeros(24, bool)
    mask[[3, 17]] = True
    poisoned = np.where(mask, LOGITS, np.nan)
    tokens = [ejkernel.sample_tokens(poisoned, jax.random.key(i), token_mask=mask) for i in range(8)]
    assert {*np.ravel(tokens)} == {3, 17}


def test_class_form() -> None:
    drawn = ejkernel.SampleTokens()(LOGITS, jax.random.key(0), top_k=3)
    np.testing.assert_array_equal(drawn, ejkernel.sample_tokens(LOGITS, jax.random.key(0), top_k=3))

"""`lightning_indexer` on XLA: in pieces, scores that are not numbers, what it holds in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations import get_operation
from ejkernel.operations.lightning_indexer.cases import arrays
from ejkernel_xla.lightning_indexer import kernel


def _bound(**options: Any) -> Any:
    made = arrays(19, levels=1)(np.random.default_rng(0))
    return get_operation("lightning_indexer").canonicalise(
        **{name: jnp.asarray(array) for name, array in made.items()}, **options
    )


@pytest.mark.parametrize("causal", [True, False])
def test_pieces_of_keys_and_queries_change_nothing(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = _bound(k=6, causal=causal)
    wanted = kernel.forward(bound.call, bound.inputs, None).tokens
    monkeypatch.setattr(kernel, "_KEYS", 4)
    monkeypatch.setattr(kernel, "_NUMBERS", 5 * 2 * 19)
    pieces = jax.jit(lambda inputs: kernel.forward(bound.call, inputs, None).tokens)
    np.testing.assert_array_equal(pieces(bound.inputs), wanted)
    assert "while" in pieces.lower(bound.inputs).as_text()
    counts = np.minimum(np.arange(19) + 1, 6) if causal else np.full(19, 6)
    np.testing.assert_array_equal((wanted >= 0).sum(-1), np.broadcast_to(counts, (2, 19)))


def test_a_score_that_is_not_a_number_comes_last() -> None:
    bound = _bound(k=6)
    key = bound.inputs.key.at[:, 2].set(jnp.nan)
    tokens = np.asarray(kernel.forward(bound.call, bound.inputs._replace(key=key), None).tokens)
    assert not (tokens[:, 6:] == 2).any() and (tokens[:, 2:6] == 2).any(-1).all()


def test_it_never_holds_all_scores() -> None:
    spec, length, found = jax.ShapeDtypeStruct, 32768, []
    shapes = (spec((1, length, 4, 16), jnp.float32), spec((1, length, 16), jnp.float32), spec((1, length, 4), jnp.float32))

    def run(*arrays: Any) -> Any:
        bound = get_operation("lightning_indexer").canonicalise(*arrays, k=16)
        found.append(bound.call)
        return kernel.forward(bound.call, bound.inputs, None).tokens

    temporary = jax.jit(run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert temporary < length * length * 4 / 8

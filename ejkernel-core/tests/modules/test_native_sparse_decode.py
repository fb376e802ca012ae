"""Decoding steps of native sparse attention over a cache, against the whole sequence at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import ejkernel
from ejkernel.utils.tolerance import Tolerance, check_close

CLOSE = Tolerance(5e-6, 5e-5)
B, T, H, K, D, V, BLOCK, SPARE = 2, 23, 4, 2, 8, 6, 4, 5
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


QUERY, KEY, VALUE = normal(B, T, H, D), normal(B, T, K, D), normal(B, T, K, V)
GATES = {name: jax.nn.sigmoid(normal(B, T, H)) for name in ("g_cmp", "g_slc", "g_swa")}
BRANCHES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "chosen": ((), {"block_counts": 3}),
    "compressed": (("g_cmp", "g_slc"), {"block_counts": 2}),
    "window": (("g_slc", "g_swa"), {"block_counts": 1, "window_size": 5}),
    "all": (("g_cmp", "g_slc", "g_swa"), {"block_counts": 4, "window_size": 9}),
    "every block": (("g_cmp",), {"block_counts": 100, "window_size": 100}),
}


def cache(array: Any, lengths: Any) -> Any:
    """With room for more; what is past each row's length holds NaN."""
    room = jnp.pad(array, [(0, 0), (0, SPARE), (0, 0), (0, 0)])
    return jnp.where(jnp.arange(T + SPARE)[None, :, None, None] < lengths[:, None, None, None], room, jnp.nan)


def at(array: Any, lengths: Any) -> Any:
    """The rows of the last tokens `[B,1,...]`."""
    return array[jnp.arange(B), jnp.maximum(lengths - 1, 0)][:, None]


def step(lengths: Any, gates: Any, **options: Any) -> Any:
    own = {name: at(GATES[name], lengths) for name in gates}
    return ejkernel.native_sparse_attention(
        at(QUERY, lengths), cache(KEY, lengths), cache(VALUE, lengths), **own, block_size=BLOCK, kv_lens=lengths, **options
    )


@pytest.mark.parametrize("lengths", [(1, 4), (5, 23), (8, 9), (16, 20)])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_step_gives_what_the_whole_sequence_gives(name: str, lengths: tuple[int, int]) -> None:
    gates, options = BRANCHES[name]
    whole = ejkernel.native_sparse_attention(QUERY, KEY, VALUE, **{g: GATES[g] for g in gates}, block_size=BLOCK, **options)
    ends = jnp.array(lengths)
    got = jax.jit(lambda ends: step(ends, gates, **options))(ends)
    check_close(name, got, at(whole, ends), CLOSE)


def test_given_blocks_counts_and_empty_rows() -> None:
    """Repeated blocks count once; blocks past the query, negative ones and those past the count name nothing."""
    indices = jnp.array([[[[0, 3, 3, -1, 90], [5, 1, 0, 2, 4]]]] * B)
    counts = jnp.array([[[4, 2]]] * B)
    whole = {"block_indices": jnp.broadcast_to(indices, (B, T, K, 5)), "block_counts": jnp.broadcast_to(counts, (B, T, K))}
    options = {"block_size": BLOCK}
    wanted = ejkernel.native_sparse_attention(QUERY, KEY, VALUE, **whole, **options)
    for lengths in (jnp.array([23, 7]), jnp.array([0, 14])):
        got = step(lengths, (), block_indices=indices, block_counts=counts)
        for row in range(B):
            end = int(lengths[row])
            check_close("out", got[row, 0], wanted[row, end - 1] if end else np.zeros((H, V)), CLOSE)


def test_gradients() -> None:
    lengths = jnp.array([11, 22])
    gates, options = BRANCHES["all"]

    def whole(query: Any, key: Any, value: Any) -> Any:
        out = ejkernel.native_sparse_attention(query, key, value, **GATES, block_size=BLOCK, **options)
        return jnp.sum(jnp.sin(at(out, lengths)))

    def last(query: Any, key: Any, value: Any) -> Any:
        own = {name: at(GATES[name], lengths) for name in gates}
        arrays = (at(query, lengths), cache(key, lengths), cache(value, lengths))
        return jnp.sum(jnp.sin(ejkernel.native_sparse_attention(*arrays, **own, block_size=BLOCK, kv_lens=lengths, **options)))

    for got, wanted in zip(*(jax.grad(f, (0, 1, 2))(QUERY, KEY, VALUE) for f in (last, whole)), strict=True):
        check_close("gradient", got, wanted, CLOSE)


def test_over_a_mesh_and_explained() -> None:
    lengths = jnp.array([11, 22])
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,))
    got = step(lengths, (), block_counts=2, mesh=mesh, in_specs=(P("dp"),) * 3, out_specs=P("dp"))
    check_close("out", got, step(lengths, (), block_counts=2), CLOSE)
    spec = jax.ShapeDtypeStruct
    shapes = (spec((B, 1, H, D), jnp.float32), spec((B, T, K, D), jnp.float32), spec((B, T, K, V), jnp.float32))
    found = ejkernel.explain(
        "native_sparse_attention", *shapes, kv_lens=spec((B,), jnp.int32), block_counts=2, block_size=BLOCK
    )
    assert found.forward.operation == "flash_attention"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"query": QUERY}, ValueError, "query: got 23 tokens, expected 1 with kv_lens"),
        ({"kv_lens": jnp.array([1])}, ValueError, r"kv_lens: got shape \(1,\), expected \(2,\) = \[B\]"),
        ({"kv_lens": jnp.array([1, 24])}, ValueError, r"kv_lens: got values in \[1, 24\], expected values in \[0, 23\]"),
        ({"kv_lens": jnp.ones(2)}, TypeError, "kv_lens: got dtype float32, expected integers"),
        ({"cu_seqlens": jnp.array([0, 1])}, ValueError, "cu_seqlens: got an array, expected None beside kv_lens"),
        ({"kv_lens": None}, ValueError, "key: got length 23, expected the query's 1"),
    ],
)
def test_mistakes(changed: Any, error: type[Exception], message: str) -> None:
    arguments = {"query": QUERY[:, :1], "key": KEY, "value": VALUE, "kv_lens": jnp.array([3, 4]), **changed}
    with pytest.raises(error, match=message):
        ejkernel.native_sparse_attention(**arguments)

"""`flash_attention` whose keys stand in pages that a table names, against the same keys gathered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel import MaskInfo
from ejkernel.compositions.paged_flash import attend_over_pages

PAGES, SIZE, ROWS, WIDTH = 12, 4, 3, 3
TABLES = jnp.array([[5, 0, -1], [3, 7, 1], [2, 9, 4]])
LENGTHS = jnp.array([6, 9, 0])
COUNTED = jnp.array([0, 6, 15, 15])


def arrays(length: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(length)
    shapes = ((ROWS, length, 4, 8), (PAGES, SIZE, 2, 8), (PAGES, SIZE, 2, 8))
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)  # pyright: ignore[reportReturnType]


def gathered(query: Any, key: Any, value: Any, **options: Any) -> list[Any]:
    """Every row with its own keys alone."""
    rows = []
    for row, length in enumerate(LENGTHS.tolist()):
        dense = (pages[TABLES[row]].reshape(1, -1, *pages.shape[2:])[:, :length] for pages in (key, value))
        rows.append(ejkernel.flash_attention(query[row : row + 1], *dense, **options)[0])
    return rows


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("counted", ["cumulative", "lengths", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "sliding_window": 2, "softmax_scale": 0.3, "logits_soft_cap": 5.0},
        {"sliding_window": (3, 0)},
    ],
    ids=["all", "causal", "window", "window-alone"],
)
def test_as_gathered_keys(length: int, counted: str, options: dict[str, Any]):
    query, key, value = arrays(length)
    info = None if counted == "cumulative" else MaskInfo(key_lengths=LENGTHS)
    cumulative = None if counted == "lengths" else COUNTED
    run = jax.jit(
        lambda *given: ejkernel.flash_attention(
            *given, cum_seqlens_k=cumulative, block_tables=TABLES, mask_info=info, **options
        )
    )
    # a window alone, one that ends at the query, is causal; dense windows count from the first key, so they are said causal
    same = {**options, **({"causal": True} if "sliding_window" in options else {})}
    if same.get("causal"):
        same["causal_alignment"] = "bottom_right"
    if "sliding_window" in same:  # of the last queries: positions are moved by a mask
        left = same.pop("sliding_window")
        left = left[0] if isinstance(left, tuple) else left
        wanted = []
        for row, keys in enumerate(LENGTHS.tolist()):
            moved = MaskInfo(query_positions=jnp.arange(length)[None] + keys - length).apply_causal()
            dense = (pages[TABLES[row]].reshape(1, -1, *pages.shape[2:])[:, :keys] for pages in (key, value))
            rest = {name: option for name, option in same.items() if not name.startswith("causal")}
            seen = moved.apply_sliding_window((left, 0))
            wanted.append(ejkernel.flash_attention(query[row : row + 1], *dense, mask_info=seen, **rest)[0])
    else:
        wanted = gathered(query, key, value, **same)
    found = run(query, key, value)
    assert found.shape == query.shape
    for row in range(ROWS):
        np.testing.assert_allclose(found[row], wanted[row], atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_padded_queries_and_statistics(causal: bool):
    query, key, value = arrays(4)
    info = MaskInfo(query_lengths=jnp.array([2, 4, 1]), key_lengths=LENGTHS, causal=causal)
    out, lse = ejkernel.flash_attention(query, key, value, block_tables=TABLES, mask_info=info, return_lse=True)
    for row, (tokens, keys) in enumerate([(2, 6), (4, 9)]):
        dense = (pages[TABLES[row]].reshape(1, -1, *pages.shape[2:])[:, :keys] for pages in (key, value))
        alignment = {"causal": True, "causal_alignment": "bottom_right"} if causal else {}
        wanted, statistics = ejkernel.flash_attention(query[row : row + 1, :tokens], *dense, return_lse=True, **alignment)
        np.testing.assert_allclose(out[row, :tokens], wanted[0], atol=2e-6)
        np.testing.assert_allclose(lse[row, :tokens], statistics[0], atol=2e-6)
        assert not out[row, tokens:].any() and (lse[row, tokens:] == -jnp.inf).all()
    assert not out[2].any() and (lse[2] == -jnp.inf).all()


@pytest.mark.parametrize("axes", [3, 4])
def test_packed_queries(axes: int):
    query, key, value = arrays(1)
    tokens = jnp.concatenate([query[0], query[1], query[2], query[0]])  # [4, H, D]: 1, 2 and 1 of the rows
    starts = jnp.array([0, 1, 3, 4])
    given = tokens if axes == 3 else tokens[None]
    out = ejkernel.flash_attention(
        given, key, value, cum_seqlens_q=starts, cum_seqlens_k=COUNTED, block_tables=TABLES, causal=True
    )
    wanted = ejkernel.unified_attention(tokens, key, value, LENGTHS, TABLES, starts)
    assert out.shape == given.shape
    np.testing.assert_allclose(out.reshape(wanted.shape), wanted, atol=1e-6)


def test_over_a_mesh_rows_and_heads_are_split():
    query, key, value = arrays(2)
    query, tables, lengths = query[:2], TABLES[:2], LENGTHS[:2]
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    pages = P(None, None, "tp", None)
    sinks = jnp.arange(4.0)
    given = {"query": query, "key": key, "value": value, "softmax_aux": sinks, "block_tables": tables}
    counted = jnp.array([0, 6, 15])
    wanted = ejkernel.flash_attention(**given, cum_seqlens_k=counted, causal=True)
    specs = (P("dp", None, "tp", None), pages, pages, None, None, None, P("tp"), P("dp", None))
    for known in (specs, specs[:7]):  # a table without a spec is split as the rows are
        placed = {"mesh": mesh, "in_specs": known, "out_specs": specs[0]}
        out = ejkernel.flash_attention(**given, cum_seqlens_k=counted, causal=True, **placed)
        np.testing.assert_allclose(out, wanted, atol=1e-6)
    info = MaskInfo(key_lengths=lengths)
    out = ejkernel.flash_attention(**given, mask_info=info, causal=True, mesh=mesh, in_specs=specs, out_specs=specs[0])
    np.testing.assert_allclose(out, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cum_seqlens_k": None},
            "block_tables: got a page table, expected None; .* pass cum_seqlens_k, or lengths in mask_info",
        ),
        ({"bias": jnp.zeros((1, 1, 2, 9))}, "bias: got an array, expected None with block_tables"),
        ({"dropout_prob": 0.5}, r"dropout_prob: got 0\.5, expected 0\.0 with block_tables"),
        ({"chunk_size": 4}, "chunk_size: got 4, expected None with block_tables"),
        ({"normalize_output": False}, "normalize_output: got False, expected True with block_tables"),
        ({"causal": True, "causal_alignment": "top_left"}, "causal_alignment: got 'top_left', expected 'bottom_right'"),
        ({"sliding_window": (2, 1)}, r"sliding_window: got \(2, 1\), expected \(left, 0\) with block_tables"),
        ({"mask_info": MaskInfo(chunk_size=4)}, "mask_info: got a mask with chunk_size, expected lengths and causality alone"),
        ({"cum_seqlens_k": jnp.array([0, 6, 9])}, r"cum_seqlens_k: got shape \(3,\), expected \[B \+ 1\] = \[4\]"),
        ({"cum_seqlens_k": jnp.array([0, 6, 19, 19])}, r"cum_seqlens_k: got values in \[0, 13\], expected values in \[0, 12\]"),
        (
            {"block_tables": TABLES[:2], "cum_seqlens_k": COUNTED[:3]},
            "block_tables: got 2 rows, expected one for each of the 3",
        ),
        ({"cum_seqlens_q": jnp.array([0, 1, 1, 2])}, "query: got batch size 3, expected 1 with packed sequences"),
    ],
)
def test_refused(options: dict[str, Any], message: str):
    query, key, value = arrays(2)
    with pytest.raises(ValueError, match=f"^{message}"):
        ejkernel.flash_attention(query, key, value, **{"block_tables": TABLES, "cum_seqlens_k": COUNTED, **options})


def test_option_that_flash_attention_gets_later_is_not_ignored():
    """The contract's `prefix`, which the public function has not: nothing lists it here."""
    query, key, value = arrays(2)
    with pytest.raises(ValueError, match=r"^prefix: got 3, expected None with block_tables"):
        attend_over_pages(
            {"query": query, "key": key, "value": value, "bias": None},
            {"logits_dtype": None, "prefix": 3},
            positional=(),
            mesh=None,
            in_specs=None,
            out_specs=None,
        )


def test_explained_from_shapes():
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*arrays(2), COUNTED, TABLES)]
    query, key, value, counted, tables = shapes
    explained = ejkernel.explain("flash_attention", query, key, value, cum_seqlens_k=counted, block_tables=tables)
    assert explained.forward.operation == "paged_attention"

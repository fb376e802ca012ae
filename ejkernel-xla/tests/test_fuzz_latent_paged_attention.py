"""Latent attention over pages on random problems: requests, windows, caps, stored types, scales and tiles, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, mapped_axes, seeds
from hypothesis import strategies as st

from ejkernel.operations.paged_attention.cases import cache_of
from ejkernel_xla.paged_attention.config import PagedAttentionConfig

REQUESTS, TOKENS, PAGE = 3, 8, 4


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled anew: few of these, so that most examples differ in requests and numbers only."""

    dtype: str
    config: PagedAttentionConfig
    stored: str | None
    scaled: bool
    options: Mapping[str, Any]


PROGRAMS = (
    Program("float32", PagedAttentionConfig(1, 4, 2), None, True, {"sliding_window": 4, "return_lse": True}),
    Program("float32", PagedAttentionConfig(4, 3, 1), None, False, {"logits_soft_cap": 1.5}),
    Program("bfloat16", PagedAttentionConfig(2, 64, 8), None, False, {}),
    Program("float16", PagedAttentionConfig(4, 3, 1), "int8", True, {"sliding_window": 1}),
    Program("float32", PagedAttentionConfig(2, 5, 3), "float8_e4m3fn", True, {"logits_soft_cap": 1.5, "return_lse": True}),
)


@st.composite
def problems(draw: Any) -> tuple[Program, dict[str, Any], dict[str, Any]]:
    """Three requests of up to 12 keys; the shapes are always the same."""
    program, rng = draw(st.sampled_from(PROGRAMS)), np.random.default_rng(draw(seeds))
    requests, room = [], TOKENS
    for _ in range(REQUESTS):
        new = draw(st.integers(0, min(room, 5)))
        requests.append((new, max(new, draw(st.integers(0, 3 * PAGE)))))
        room -= new
    described, used = cache_of(rng, requests, page_size=PAGE, spare_entries=0)
    tables = np.full((REQUESTS, 3), -1, np.int32)
    tables[:, : described["block_tables"].shape[1]] = described["block_tables"]
    pages = np.full((3 * REQUESTS + 2, PAGE, 11), np.nan, np.float32)
    pages[: len(used)] = np.where(used[..., None], rng.standard_normal((*used.shape, 11)), np.nan)
    arrays = {
        "query_nope": rng.standard_normal((TOKENS, 2, 5)).astype(np.float32),
        "query_pe": rng.standard_normal((TOKENS, 2, 3)).astype(np.float32),
        **described,
        "block_tables": tables,
    }
    stored = program.stored
    arrays["pages"] = pages if stored is None else np.nan_to_num(8 * pages).astype(jnp.dtype(stored))
    if program.scaled:
        arrays |= {name: np.float32(rng.uniform(0.1, 0.2)) for name in ("k_scale", "v_scale")}
    return program, arrays, {"pe_offset": 7, **program.options}


def check(drawn: tuple[Program, dict[str, Any], dict[str, Any]]) -> None:
    program, arrays, options = drawn
    check_problem("latent_paged_attention", arrays, options, program.dtype, config=program.config)


@FEW
@hypothesis.given(problems())
def test_random_problems(drawn):
    check(drawn)


@pytest.mark.slow
@MANY
@hypothesis.given(problems())
def test_many_random_problems(drawn):
    check(drawn)


@hypothesis.settings(FEW, max_examples=3)
@hypothesis.given(problems(), st.data())
def test_vmap(drawn, data):
    check_vmap("latent_paged_attention", *drawn[1:], data.draw(mapped_axes(drawn[1])))


@pytest.mark.slow
@hypothesis.settings(MANY, max_examples=60)
@hypothesis.given(problems(), st.data())
def test_many_vmap(drawn, data):
    check_vmap("latent_paged_attention", *drawn[1:], data.draw(mapped_axes(drawn[1])))

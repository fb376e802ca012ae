"""Old names of config knobs."""

from __future__ import annotations

import dataclasses
import re

import pytest

from ejkernel.tuning import from_plain, to_plain
from ejkernel_cuda._rows.config import BackwardConfig as RowsBackwardConfig, ForwardConfig as RowsForwardConfig
from ejkernel_cuda.flash_attention.config import ForwardConfig as AttentionConfig
from ejkernel_cuda.paged_attention.config import PagedAttentionConfig
from ejkernel_cuda.qk_norm_rope.config import BackwardConfig as HeadsBackwardConfig

RENAMED = [
    (AttentionConfig, "take_turns", "ping_pong", True, {"persistent": True}),
    (AttentionConfig, "packed", "pack_gqa", True, {"ping_pong": False, "persistent": True}),
    (AttentionConfig, "sharers", "split_kv_ctas", 3, {"ping_pong": False, "persistent": True}),
    (PagedAttentionConfig, "together", "tile_key_heads", 2, {"num_stages": 3, "workers": 7}),
    (PagedAttentionConfig, "boxes", "tma", True, {"num_stages": 3, "workers": 7}),
    (PagedAttentionConfig, "stages", "num_stages", 4, {"workers": 7}),
    (RowsForwardConfig, "stages", "num_stages", 2, {"threads": 32}),
    (RowsBackwardConfig, "stages", "num_stages", 2, {"threads": 32, "partials": 5}),
    (RowsBackwardConfig, "parts", "partials", 5, {"threads": 32}),
    (HeadsBackwardConfig, "parts", "partials", 5, {"span": 4}),
]


@pytest.mark.parametrize(("config", "old", "new", "value", "others"), RENAMED)
def test_an_old_name_is_the_new_one_with_a_warning(config, old, new, value, others):
    wanted = config(**{new: value}, **others)
    assert getattr(wanted, new) == value
    with pytest.warns(DeprecationWarning, match=f"{config.__name__}: {old} is now called {new}"):
        assert config(**{old: value}, **others) == wanted
    assert {field.name for field in dataclasses.fields(config)}.isdisjoint({old})
    assert from_plain(config, to_plain(wanted)) == wanted


def test_old_and_new_name_together_are_refused():
    message = re.escape("ForwardConfig: take_turns is the old name of ping_pong; give ping_pong alone")
    with pytest.raises(TypeError, match=message):
        AttentionConfig(ping_pong=True, take_turns=False, persistent=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=message):
        AttentionConfig(True, True, take_turns=False)  # pyright: ignore[reportCallIssue]


def test_other_names_are_refused_as_before():
    with pytest.raises(TypeError, match="turns"):
        AttentionConfig(turns=True, persistent=True)  # pyright: ignore[reportCallIssue]

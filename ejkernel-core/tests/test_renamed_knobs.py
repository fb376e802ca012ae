"""Old names of config knobs: accepted wherever a user writes them, with a warning, and in what was stored."""

from __future__ import annotations

import dataclasses

import pytest

from ejkernel import tuning
from ejkernel.configs.spaces import build, fits
from ejkernel.plugin import ConfigSpace
from ejkernel.utils.renamed_knobs import renamed_knobs


@renamed_knobs(rows="block_rows", turns="ping_pong")
@dataclasses.dataclass(frozen=True)
class Blocks:
    block_rows: int = 8
    ping_pong: bool = False


SPACE = ConfigSpace(Blocks, lambda call, target: Blocks(), lambda call, target: (Blocks(),))
SAID = r"Blocks: rows is now called block_rows"


def test_the_constructor():
    with pytest.warns(DeprecationWarning, match=SAID) as warned:
        assert Blocks(rows=4) == Blocks(4)  # pyright: ignore[reportCallIssue]
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="turns is now called ping_pong"):
        assert Blocks(4, turns=True) == Blocks(4, True)  # pyright: ignore[reportCallIssue]


def test_mappings_of_cfg_and_overlays():
    assert fits((("rows", 4),), SPACE)
    with pytest.warns(DeprecationWarning, match=SAID):
        assert build("cfg", Blocks, {"rows": 4}, Blocks(1, True)) == Blocks(4, True)


def test_what_was_stored_is_read_without_a_word():
    assert tuning.from_plain(Blocks, {"rows": 4, "ping_pong": True}) == Blocks(4, True)
    assert tuning.to_plain(Blocks(4)) == {"block_rows": 4, "ping_pong": False}


def test_both_names_are_refused():
    message = "Blocks: rows is the old name of block_rows; give block_rows alone"
    with pytest.raises(TypeError, match=message):
        Blocks(block_rows=1, rows=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=message):
        Blocks(1, rows=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=message):
        build("cfg", Blocks, {"block_rows": 1, "rows": 2})


def test_other_names_are_refused_as_before():
    with pytest.raises(TypeError, match="lines"):
        Blocks(lines=2)  # pyright: ignore[reportCallIssue]
    assert not fits((("lines", 4),), SPACE)
    with pytest.raises(ValueError, match="unknown knob 'lines'"):
        build("cfg", Blocks, {"lines": 2})

"""What a user sees in a terminal of 80 columns and 24 rows: nothing cut, nothing overwritten, and soon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from terminal import CODE, COLUMNS, complete, see

from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.cli.output import table


def is_whole(line: str) -> bool:
    """No cell was cut to fit."""
    return len(line) <= COLUMNS and "\N{HORIZONTAL ELLIPSIS}" not in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("-h",),
        ("list", "-h"),
        ("explain", "--help"),
        ("bench", "-h"),
        ("demo", "-h"),
        (),
    ],
)
def test_version_and_help_import_no_jax(arguments):
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr == "imported:\n"
    assert done.stdout.startswith("Usage: ejkernel" if arguments != ("--version",) else "0.")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ejkernel ex", ["explain"]),
        ("ejkernel list rms", ["rms_norm"]),
        ("ejkernel explain flash_attn", ["flash_attn_varlen"]),
        ("ejkernel tune rwkv7_", ["rwkv7_mul"]),
        ("ejkernel cache show lay", ["layer_norm"]),
        ("ejkernel list --platform x", ["xla"]),
    ],
)
def test_shells_complete_names_without_jax(line, expected):
    assert complete(line) == expected


def test_explain_of_what_nothing_runs_has_status_1():
    for json_too in ((), ("--json",)):
        assert see(["explain", "rms_norm", "--platform", "triton", *json_too]).status == 1
    assert see(["explain", "rms_norm", "--platform", "triton", "--target", "gpu:9.0"]).status == 0


def test_list_has_a_line_for_most_operations():
    seen = see(["list"])
    assert seen.status == 0 and all(map(is_whole, seen.lines))
    assert {*OPERATIONS} <= {*seen.words}
    assert len(seen.lines) < 1.7 * len(OPERATIONS)


def test_list_of_one_operation():
    seen = see(["list", "flash_attention"])
    assert seen.status == 0 and all(map(is_whole, seen.lines))
    assert "xla forward, backward any ejkernel-xla 0.1.0 ok" in [" ".join(line.split()) for line in seen.lines]


def test_explain_takes_the_usual_case():
    seen = see(["explain", "rms_norm"])
    assert seen.status == 0 and all(map(is_whole, seen.lines))
    assert seen.lines[0].startswith("the case bench-2048x4096, one of ")
    assert "forward on cpu: xla, by priority" in seen.lines
    (refused,) = [line for line in seen.text.split("backward on cpu")[0].splitlines() if line.startswith("triton ")]
    assert refused.split()[:2] == ["triton", "refused"]


def test_doctor():
    seen = see(["doctor"])
    assert seen.status == 0 and all(map(is_whole, seen.lines))
    assert seen.lines[-2] == "Healthy." or seen.lines[-1] == "Healthy."


def test_tune_shows_configs_whole(tmp_path: Path):
    out = tmp_path / "table.json"
    seen = see(["tune", "grouped_matmul", "--case", "skewed", "--rounds", "1", "--forward-only", "--out", str(out)])
    assert seen.status == 0 and all(map(is_whole, seen.lines))
    (config,) = [entry["config"] for entry in json.loads(out.read_text())["entries"]]
    assert ", ".join(f"{name}={value}" for name, value in config.items()) in seen.text
    assert "".join(seen.words).endswith(f"written:{out}")  # a long path is broken
    assert "checking" not in seen.text, "the progress bar stays on the terminal"


def drawn(made: Any, width: int) -> list[str]:
    screen = Console(width=width, color_system=None)
    with screen.capture() as capture:
        screen.print(made)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_table_is_broken_between_words():
    made = table(("name", "reason"), [("triton", "runs on gpu, the target is cpu")])
    assert drawn(made, 40) == ["name    reason", "\u2500" * 38, "triton  runs on gpu, the target is cpu"]
    assert drawn(made, 24)[2:] == ["triton  runs on gpu, the", "        target is cpu"]


def test_a_table_that_cannot_stand_side_by_side_stands_below_another():
    made = table(("name", "state", "reason"), [("pallas.mosaic_gpu", "refused", "a gpu"), ("xla", "", "")])
    assert drawn(made, 24) == ["pallas.mosaic_gpu", "  state: refused", "  reason: a gpu", "xla"]

"""`ejkernel bench` in a terminal of 80 columns and 24 rows, its progress bar on the same one."""

from __future__ import annotations

from terminal import COLUMNS, complete, see

SMALL = ("bench", "rms_norm", "--size", "test", "--case", "scale", "--rounds", "2", "--input-sets", "1")


def test_shells_complete_operations_and_platforms():
    assert complete("ejkernel bench softmax rms") == ["rms_norm"]
    assert complete("ejkernel bench --platform x") == ["xla"]


def test_rows_and_refusals_stay_on_the_terminal():
    seen = see([*SMALL, "--peer", "jax"])
    assert seen.status == 0 and max(map(len, seen.lines)) <= COLUMNS
    text = " ".join(seen.words)
    for phase in ("forward", "backward"):
        part = text.split(f"rms_norm scale float32 {phase} ")[1]
        assert "xla chosen " in part and "jax " in part
        assert "triton (runs on gpu, the target is cpu)" in part.split("rms_norm scale")[0]
    assert "peer is faster in " in text


def test_a_file_gets_the_tables_and_the_terminal_the_bar(tmp_path):
    out = tmp_path / "out.txt"
    seen = see([*SMALL, "--no-peers", "--phase", "forward"], stdout=out)
    assert seen.status == 0 and seen.words == []
    assert "triton (runs on gpu, the target is cpu)" in out.read_text() and "\x1b" not in out.read_text()

"""`ejkernel bench` with results that are there: `--compare` and `--from`. Nothing is timed."""

from __future__ import annotations

import functools
import json

import pytest
from bench_documents import document, runs_of
from command_line import answer, use_own_settings


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    use_own_settings(tmp_path, monkeypatch)
    return functools.partial(answer, capsys)


@pytest.fixture
def files(tmp_path):
    """Two results of which the second is 30 % slower in one run of ours."""
    old, new = (document(operations=("softmax",), lengths=(512,), noise=0.005, seed=seed) for seed in (0, 1))
    run = runs_of(new, "xla")[0]
    run["wall_s"] = [1.3 * seconds for seconds in run["wall_s"]]
    for name, found in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return str(tmp_path / "old.json"), str(tmp_path / "new.json")


def test_compare(cli, files):
    answer = cli("bench", "--compare", *files)
    assert answer.status == 1
    assert "slower" in answer.out
    assert "1.3" in answer.out
    assert answer.out.splitlines()[-1] == "regressions of ours: 1"
    assert cli("bench", "--compare", *files[::-1]).status == 0
    assert cli("bench", "--compare", *files, "--all").out.count("same") >= 5


def test_compare_json(cli, files):
    answer = cli("bench", "--compare", *files, "--json")
    assert answer.status == 1
    assert answer.json["counts"] == {"slower": 1, "same": 5}
    (change,) = (change for change in answer.json["changes"] if change["regression"])
    assert change["ratio"] == pytest.approx(1.3, rel=0.01)


def test_draw(cli, files, tmp_path):
    answer = cli("bench", "--from", files[0], "--plots", str(tmp_path / "report"))
    assert answer.status == 0
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"index.html", "overview.png", "softmax.png"}


def test_mistakes(cli, files, tmp_path):
    absent = str(tmp_path / "absent.json")
    (tmp_path / "list.json").write_text("[]")
    for arguments, message in (
        (("--compare", absent, files[0]), f"--compare: {absent}: No such file or directory"),
        (("--compare", files[0], str(tmp_path / "list.json")), "got list, expected a benchmark result of schema 1"),
        (("--from", files[0]), "--from: needs --plots"),
        (("--from", absent, "--plots", str(tmp_path)), f"--from: {absent}: No such file or directory"),
    ):
        assert message in cli("bench", *arguments).mistake

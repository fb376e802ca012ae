"""The tables of `ejkernel bench`, and its mistakes."""

from __future__ import annotations

import json

import pytest

from ejkernel.cli import main


@pytest.fixture
def shell(world, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")

    def run(*arguments):
        status = main(("bench", *arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


SMALL = ("rms_norm", "--size", "test", "--case", "scale", "--rounds", "5", "--input-sets", "1", "--phase", "forward")


def test_table(shell, tmp_path):
    out = tmp_path / "result.json"
    status, text, _ = shell(*SMALL, "--out", str(out))
    assert status == 0
    lines = text.splitlines()
    by_run = {line.partition("  ")[0].strip(): line for line in lines}
    (title,) = [line for line in lines if line.startswith("rms_norm scale float32 forward  (limit ")]
    assert title.endswith(" ms; errors against NumPy float64)")
    assert by_run["slow"].split()[1] == "chosen" and "GB/s" in by_run["run"]
    assert by_run["quick"].split()[1] == "LOSS" and float(by_run["quick"].split()[2].removeprefix("x")) < 0.4
    assert by_run["wrong"].split()[1] == "wrong" and by_run["raising"].split()[1] == "failed"
    assert any(line.startswith("wrong: wrong: out: ") for line in lines)
    assert "failed: raising: RuntimeError: out of registers" in lines
    (refused,) = [line for line in lines if line.startswith("refused: ")]
    assert (
        refused.startswith("refused: moon (needs a moon)") and "; choosy (does not do scale); elsewhere (runs on gpu" in refused
    )
    assert "a peer is faster in 1 of 1 cases with peers" in text
    (loss,) = [line for line in lines if line.startswith("rms_norm scale ") and "quick" in line]
    assert float(loss.split()[-1]) < 0.4
    assert json.loads(out.read_text())["cases"][0]["case"] == "scale"


def test_json_alone(shell):
    status, text, errors = shell(*SMALL, "--json", "--no-peers", "--platform", "slow")
    result = json.loads(text)
    assert (status, errors) == (0, "")
    assert [run["name"] for run in result["cases"][0]["runs"]] == ["slow"]
    assert result["command"].split()[0] == "ejkernel"


def test_no_loss(shell):
    _, text, _ = shell(*SMALL, "--no-peers", "--platform", "slow")
    assert "no peer is faster in 0 cases with peers" in text


def test_list(shell):
    _, text, _ = shell("rms_norm", "--size", "cpu", "--list", "--json")
    found = json.loads(text)
    assert [case["case"] for case in found["cases"]] == ["bench-2048x4096", "bench-32768x128"]
    assert found["cases"][0]["peers"] == ["quick", "wrong", "raising", "choosy"]
    assert found["peers"]["elsewhere"] == "runs on gpu, the target is cpu"
    assert found["peers"]["absent"] == "not installed: no_such_package"
    _, text, _ = shell("rms_norm", "--size", "cpu", "--list")
    assert "bench-32768x128" in text and "not installed: no_such_package" in text


def test_plots(shell, tmp_path):
    pytest.importorskip("matplotlib")
    assert shell(*SMALL, "--plots", str(tmp_path / "plots"))[0] == 0
    assert {"index.html", "overview.png", "rms_norm.png"} == {file.name for file in (tmp_path / "plots").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (("rms_nrom",), "operation: got 'rms_nrom', expected one of"),
        (
            ("rms_norm", "--case", "nothing"),
            "--case: got 'nothing', expected a case of rms_norm with size cpu: bench-2048x4096",
        ),
        (("rms_norm", "--size", "huge"), "--size: got 'huge', expected one of auto, cpu, gpu, test"),
        (("rms_norm", "--no-peers", "--peer", "quick"), "--no-peers: leave it out beside --peer"),
        (("rms_norm", "--peer", "nobody"), "--peer: got 'nobody', expected one of"),
        (("rms_norm", "--out", "/no/such/folder/x.json"), "--out: /no/such/folder/x.json: there is no folder /no/such/folder"),
    ],
)
def test_mistakes(shell, arguments, mistake):
    status, text, errors = shell(*arguments)
    assert (status, text, errors.count("\n")) == (2, "", 1)
    assert mistake in errors

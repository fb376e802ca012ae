"""`ejkernel tune` on small problems of this machine."""

from __future__ import annotations

import json
import re

import pytest

from ejkernel.tuning import AutotuningResult, cache_entries


def test_named_case(cli, tmp_path):
    out = tmp_path / "table.json"
    report = cli("tune", "grouped_matmul", "--case", "skewed", "--rounds", "1", "--out", str(out), "--json").json
    entries = AutotuningResult.load(out).entries
    assert [(e.key.operation, e.key.phase, e.key.implementation) for e in entries] == [
        ("grouped_matmul", "forward", "xla"),
        ("grouped_matmul", "backward", "xla"),
    ]
    assert len(report["entries"]) == 2
    assert all(entry.provenance["device"] and len(entry.timings) > 1 for entry in entries)


def test_cases_by_pattern_and_dtype(cli):
    arguments = ("--case", "skew*", "--dtype", "bfloat16,float32", "--forward-only", "--rounds", "1", "--json")
    entries = cli("tune", "grouped_matmul", *arguments).json["entries"]
    assert [entry["key"]["call"]["lhs"]["dtype"] for entry in entries] == ["bfloat16", "float32"]
    assert "--dtype" in cli("tune", "grouped_matmul", "--case", "skewed", "--dtype", "bf16", "--store").mistake


def test_shapes_from_a_file(cli, tmp_path):
    shapes = tmp_path / "shapes.json"
    arrays = {"query": "float32[1,8,2,4]", "key": "float32[1,8,1,4]", "value": "float32[1,8,1,4]"}
    shapes.write_text(json.dumps([{"arrays": arrays, "options": {"causal": True}}]))
    answer = cli("tune", "flash_attention", "--shapes", str(shapes), "--store", "--forward-only", "--rounds", "1")
    assert answer.status == 0 and "flash_attention forward" in answer.out
    (file,) = cache_entries()
    assert re.search(rf"^stored: 1 of 1, in {re.escape(str(file.path.parent))}, from where", answer.out, re.MULTILINE)
    assert re.search(r"^[01] of 1 configs are faster than the default(, by a factor of \d+\.\d\d)?$", answer.out, re.MULTILINE)
    assert file.entry.key.arrays().startswith("key float32[1,8,1,4]")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("{", "not JSON"),
        ("{}", "got dict, expected a list of calls"),
        ('[{"array": {}}]', "call 0: expected"),
        ('[{"arrays": {"x": "float99[2]"}}]', "x: got 'float99[2]', expected a dtype and sizes"),
        ('[{"arrays": {"x": [2]}}]', "x: got [2], expected a dtype and sizes"),
    ],
)
def test_files_that_are_something_else(cli, tmp_path, text, mistake):
    shapes = tmp_path / "shapes.json"
    shapes.write_text(text)
    assert mistake in cli("tune", "rms_norm", "--shapes", str(shapes), "--store").mistake


def test_mistakes(cli, tmp_path):
    assert cli("tune", "rms_norm", "--store").mistake == "tune: give either --shapes FILE or --case NAME"
    assert "say what to do with the result" in cli("tune", "rms_norm", "--case", "plain").mistake
    assert "did you mean" in cli("tune", "rms_nrom", "--case", "plain", "--store").mistake.lower()
    assert "--case" in cli("tune", "rms_norm", "--case", "no-such", "--store").mistake
    assert (
        "--out" in cli("tune", "softmax", "--case", "plain", "--rounds", "1", "--out", str(tmp_path / "no" / "t.json")).mistake
    )

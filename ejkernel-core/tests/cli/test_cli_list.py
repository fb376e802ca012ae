"""`ejkernel list` and `ejkernel explain`."""

from __future__ import annotations

import json

import pytest

from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.cli.explain import parse_option, parse_shape


def test_list_json(cli):
    report = cli("list", "--json").json
    assert {*OPERATIONS} <= {entry["operation"] for entry in report["operations"]}
    (norms,) = (entry for entry in report["operations"] if entry["operation"] == "rms_norm")
    assert [row["phase"] for row in norms["implementations"] if row["implementation"] == "xla"] == ["backward", "forward"]
    assert next(row for row in norms["implementations"] if row["implementation"] == "xla") == {
        "implementation": "xla",
        "phase": "backward",
        "backends": ["any"],
        "distribution": "ejkernel-xla",
        "version": "0.1.0",
        "origin": "first-party",
        "state": "ok",
    }


def test_list_of_one_operation_and_platform(cli):
    report = cli("list", "--operation", "rms_norm", "--platform", "xla", "--json").json
    assert [entry["operation"] for entry in report["operations"]] == ["rms_norm"]


def test_list_joins_phases(cli):
    lines = [line.split() for line in cli("list", "rms_norm", "--platform", "xla").out.splitlines()]
    assert ["xla", "forward,", "backward", "any", "ejkernel-xla", "0.1.0", "ok"] in lines


def test_the_former_spelling_of_the_operation(cli):
    assert cli("list", "--operation", "rms_norm").out == cli("list", "rms_norm").out


def test_list_says_what_is_peculiar(site, fresh_cli):
    site.plugin("acme", implementations="(Implementation('rms_norm', 'acme_code:forward'),)")
    lines = [" ".join(line.split()) for line in fresh_cli("list").out.splitlines()]
    (norms,) = [line for line in lines if line.startswith("rms_norm ")]
    assert "acme (forward, opt-in)" in norms and norms.endswith(" xla")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("rmsnorm",), "did you mean 'rms_norm'?"),
        (("--platform", "xlaa"), "did you mean 'xla'?"),
    ],
)
def test_list_refuses_unknown_names(cli, arguments: tuple[str, ...], expected: str):
    assert expected in cli("list", *arguments).mistake


def test_third_party_is_opt_in_and_broken_is_named(site, fresh_cli):
    site.plugin("acme", implementations="(Implementation('rms_norm', 'acme_code:forward'),)")
    site.add("ejk-sick", "sick = sick_light", {"sick_light": "raise RuntimeError('no driver')"})
    report = fresh_cli("list", "--json").json
    (norms,) = (entry for entry in report["operations"] if entry["operation"] == "rms_norm")
    states = {row["implementation"]: row["state"] for row in norms["implementations"]}
    assert (states["acme"], states["xla"]) == ("opt-in", "ok")
    assert [(p["name"], p["state"]) for p in report["unusable_plugins"]] == [("sick", "broken")]
    assert "no driver" in report["unusable_plugins"][0]["reason"]


def test_explain_json(cli):
    report = cli("explain", "rms_norm", "--shape", "x=4,8:bfloat16", "--option", "epsilon=1e-5", "--json").json
    assert (report["chosen"], report["backward"]["chosen"]) == ("xla", "xla")
    assert report["call"] == {"x": "bfloat16[4,8]", "epsilon": 1e-5, "scale_offset": 0.0} | {
        name: value for name, value in report["call"].items() if name not in ("x", "epsilon", "scale_offset")
    }


def test_explain_table(cli):
    out = cli("explain", "rms_norm", "--shape", "x=4,8").out
    assert "forward on cpu: xla, by priority" in out
    assert "backward on cpu: xla, by priority" in out


def test_explain_for_another_device(cli):
    report = cli("explain", "rms_norm", "--shape", "x=4,8", "--target", "gpu:9.0", "--json").json
    assert report["forward"]["target"] == {"backend": "gpu", "device_kind": "", "compute_capability": "9.0"}


def test_explain_by_platform(cli):
    report = cli("explain", "rms_norm", "--shape", "x=4,8", "--platform", "xla", "--json").json
    assert report["forward"]["setting"] == "argument"


def test_explain_case(cli):
    report = cli("explain", "rms_norm", "--case", "gemma", "--json").json
    assert report["call"]["x"] == "float32[4,128]"
    assert report["call"]["scale_offset"] == 1.0


def test_explain_without_shapes(cli):
    """The case that is benchmarked on the device that is explained for, in the dtype that is usual there."""
    assert cli("explain", "rms_norm", "--json").json["call"]["x"] == "float32[2048,4096]"
    assert cli("explain", "rms_norm", "--target", "gpu:9.0", "--json").json["call"]["x"] == "bfloat16[16384,4096]"
    assert cli("explain", "rms_norm", "--dtype", "float16", "--json").json["call"]["x"] == "float16[2048,4096]"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("rmsnorm", "--shape", "x=4"), "did you mean 'rms_norm'?"),
        (("rms_norm", "--shape", "x=4:float3"), "--shape: got 'x=4:float3', expected name=sizes:dtype"),
        (("rms_norm", "--shape", "x=4,-1"), "--shape: got 'x=4,-1'"),
        (("rms_norm", "--shape", "4,8"), "--shape: got '4,8'"),
        (("rms_norm", "--option", "epsilon"), "--option: got 'epsilon', expected name=value"),
        (("rms_norm", "--shape", "x=4", "--shape", "x=5"), "x: given twice"),
        (("rms_norm", "--shape", "x=4", "--shape", "y=4"), "rms_norm has no argument 'y'"),
        (("rms_norm", "--shape", "x=4", "--option", "axis=7"), "axis: got 7"),
        (("rms_norm", "--shape", "x=4", "--target", "gpuu"), "target: got 'gpuu'"),
        (("rms_norm", "--shape", "x=4", "--target", "gpu:nine"), "target: got 'gpu:nine'"),
        (("rms_norm", "--shape", "x=4", "--platform", "tritn"), "platform: got 'tritn'"),
        (("rms_norm", "--case", "gema"), "did you mean 'gemma'?"),
        (("rms_norm", "--case", "gemma", "--shape", "x=4"), "leave out --shape and --option"),
        (("rms_norm", "--dtype", "float31"), "--dtype: got 'float31', expected one of float32"),
        (("rms_norm", "--dtype", "float32", "--shape", "x=4"), "--dtype: is of a case"),
        (("rms_norm", "--option", "epsilon=1.0"), "got no arrays, expected --shape name=sizes:dtype for each of x"),
        (("flash_attn_varlen",), "got no arrays, expected --shape name=sizes:dtype for each of q, k, v, cu_seqlens_q"),
    ],
)
def test_explain_mistakes(cli, arguments: tuple[str, ...], expected: str):
    assert expected in cli("explain", *arguments).mistake


def test_shapes():
    name, spec = parse_shape("lens=:int32")
    assert (name, spec.shape, spec.dtype) == ("lens", (), "int32")
    name, spec = parse_shape("query=1,512,8,64")
    assert (name, spec.shape, spec.dtype) == ("query", (1, 512, 8, 64), "float32")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=true", True),
        ("a=False", False),
        ("a=none", None),
        ("a=3", 3),
        ("a=1e-5", 1e-5),
        ("a=(1, 2)", (1, 2)),
        ("a=BTHD", "BTHD"),
        ("a=b=c", "b=c"),
    ],
)
def test_options(text: str, value: object):
    name, parsed = parse_option(text)
    assert name == "a"
    assert json.dumps(parsed) == json.dumps(value)

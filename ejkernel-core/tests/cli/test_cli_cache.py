"""`ejkernel cache` over entries that a made-up tuning run left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ejkernel._dispatch.lowered import STORE
from ejkernel._plugins.records import Candidate
from ejkernel.configs import quarantine as _quarantine
from ejkernel.configs.entry import Check, Entry, Timing
from ejkernel.configs.key import Key, running_versions
from ejkernel.configs.store import USER_CACHE
from ejkernel.plugin import Implementation
from ejkernel.tuning import Quarantined, cache_info
from ejkernel.utils.kernel_store import KernelStore, StoredKernels, stored_kernels


def entry(operation: str = "rms_norm") -> Entry:
    key = Key(
        operation,
        "forward",
        "triton",
        1,
        '{"x":{"dtype":"float32","shape":[4,8]}}',
        "gpu",
        "NVIDIA H200",
        "9.0",
        *running_versions(),
    )
    return Entry(key, {"rows": 4}, timings=(Timing({"rows": 4}, (1e-3,)),), check=Check(True, 0.1))


@pytest.fixture
def filled() -> None:
    USER_CACHE.store(entry())
    USER_CACHE.store(entry("softmax"))


def test_show_empty(cli):
    report = cli("cache", "show", "--json").json
    assert (report["entries"], report["bytes"], report["files"], report["error"]) == (0, 0, [], None)


@pytest.mark.usefixtures("filled")
def test_show(cli):
    report = cli("cache", "show", "--json").json
    assert (report["entries"], report["states"]) == (2, {"ok": 2})
    assert {file["entry"]["key"]["operation"] for file in report["files"]} == {"rms_norm", "softmax"}
    out = cli("cache", "show").out
    assert "x float32[4,8]" in out
    assert "rows=4" in out


@pytest.mark.usefixtures("filled")
def test_unreadable_entries_are_shown(cli):
    next(cache_info().directory.iterdir()).write_text("{")
    assert cli("cache", "show", "--json").json["states"] == {"ok": 1, "unreadable": 1}


@pytest.mark.skipif(os.name != "posix", reason="needs modes of files")
@pytest.mark.usefixtures("filled")
def test_what_others_can_write_is_said_and_not_counted(cli):
    cache_info().directory.chmod(0o777)
    report = cli("cache", "show", "--json").json
    assert (report["entries"], len(report["distrusted"])) == (0, 1)
    assert "others than its owner can write to it (mode 0777)" in " ".join(cli("cache", "show").out.split())
    cache_info().directory.chmod(0o700)
    assert cli("cache", "show", "--json").json["entries"] == 2


@pytest.mark.usefixtures("filled")
def test_clear(cli, monkeypatch: pytest.MonkeyPatch):
    assert cli("cache", "clear", "--operation", "softmax", "--yes", "--json").json == {"deleted": 1, "kernels": 0}
    assert "--yes" in cli("cache", "clear", "--json").mistake
    assert "nothing can be asked without a terminal; pass --yes" in cli("cache", "clear").mistake
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    assert cache_info().count == 1
    assert cli("cache", "clear", "--yes").out == "deleted 1 entry\n"
    assert cache_info().count == 0


@pytest.mark.usefixtures("filled")
def test_compiled_kernels_are_shown_and_cleared(cli):
    assert KernelStore("triton").put("0" * 64, b"a kernel") and STORE.put("0" * 64, b"its lowered code")
    assert cli("cache", "show", "--json").json["kernels"]["count"] == 2
    assert "compiled kernels: 2, " in cli("cache", "show").out
    cli("cache", "clear", "--operation", "softmax", "--yes")
    assert stored_kernels().count == 2
    assert cli("cache", "clear", "--yes").out == "deleted 1 entry\ndeleted 2 compiled kernels\n"
    assert stored_kernels() == StoredKernels(0, 0)


@pytest.mark.usefixtures("filled")
def test_export_and_merge(cli, tmp_path: Path):
    file = tmp_path / "table.json"
    assert cli("cache", "export", str(file), "--json").json == {"exported": 2}
    assert cli("cache", "merge", str(file)).out == "merged 0 entries\n"
    assert cli("cache", "clear", "--yes", "--json").json == {"deleted": 2, "kernels": 0}
    assert cli("cache", "merge", str(file), "--json").json == {"merged": 2}
    assert cache_info().count == 2


@pytest.fixture
def quarantined() -> None:
    versions = _quarantine.compiling_versions(
        Candidate("triton", Implementation("rms_norm", print), "ejkernel-triton", "", "first-party")
    )
    _quarantine.add([Quarantined(entry().key, {"rows": 32}, "wrong numbers: error 7", versions)])


@pytest.mark.usefixtures("filled", "quarantined")
def test_quarantined_configs_are_shown_and_cleared(cli):
    report = cli("cache", "show", "--json").json
    assert (report["entries"], report["quarantined"]) == (3, 1)
    (record,) = [file["quarantined"] for file in report["files"] if file["quarantined"]]
    assert (record["config"], record["reason"]) == ({"rows": 32}, "wrong numbers: error 7")
    out = " ".join(cli("cache", "show").out.split())
    assert "rows=32: wrong numbers" in out and "3 entries (1 quarantined)" in out
    assert cli("cache", "clear", "--quarantine", "--operation", "softmax", "--yes", "--json").json == {
        "deleted": 0,
        "kernels": 0,
    }
    assert cli("cache", "clear", "--quarantine", "--yes").out == "deleted 1 entry\n"
    assert (cache_info().count, cache_info().quarantined) == (2, 0)


def test_mistakes(cli, tmp_path: Path):
    assert "No such file" in cli("cache", "merge", str(tmp_path / "absent.json")).mistake
    (tmp_path / "other.json").write_text("[1]")
    assert "tuned configs" in cli("cache", "merge", str(tmp_path / "other.json")).mistake
    assert "No such file" in cli("cache", "export", str(tmp_path / "no" / "where.json")).mistake

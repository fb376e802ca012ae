"""The user's cache on disk: many processes, damaged files, directories that cannot be written, and its upkeep."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ejkernel
from ejkernel import kernel_registry, tuning
from ejkernel.configs import store as _store
from ejkernel.errors import CacheWarning

pytestmark = pytest.mark.filterwarnings("error")

_WRITER = """
import dataclasses, sys
from ejkernel import tuning
from ejkernel.configs.store import directory, read
worker = int(sys.argv[1])
key = tuning.Key("rms_norm", "forward", "fixture", 1, "{}", "cpu", "cpu", "", "0.0.0", "0.1")
for number in range(40):
    mine = number < 20
    version = 1000 * (worker + 1) + number if mine else number
    timing = tuning.Timing({"rows": worker}, tuple(float(i) for i in range(2000)))
    entry = tuning.Entry(dataclasses.replace(key, version=version), {"rows": worker}, timings=(timing,),
                         check=tuning.Check(True, 0.5))
    assert tuning.store(entry)
    for _ in range(10):
        assert len(read(directory() / f"{entry.key.digest}.json").timings[0].seconds) == 2000
"""


def test_eight_processes(world: Any) -> None:
    workers = [subprocess.Popen([sys.executable, "-W", "error", "-c", _WRITER, str(worker)]) for worker in range(8)]
    assert [worker.wait(timeout=300) for worker in workers] == [0] * 8
    found = tuning.cache_entries()
    assert {file.state for file in found} == {"other version"}
    by_version = {file.entry.key.version: file.entry for file in found}
    own = {1000 * (worker + 1) + number: worker for worker in range(8) for number in range(20)}
    assert by_version.keys() == {*own, *range(20, 40)}
    assert {version: by_version[version].config["rows"] for version in own} == own
    assert all(len(entry.timings[0].seconds) == 2000 for entry in by_version.values())
    assert [path for path in tuning.cache_info().directory.iterdir() if path.suffix != ".json"] == []


def test_threads(world: Any) -> None:
    entries = [world.entry(1, key=dataclasses.replace(world.key(), version=number)) for number in range(16)]
    found: list[Any] = []

    def work(entry: Any) -> None:
        tuning.store(entry)
        tuning.remember(entry)
        found.append(_store.USER_CACHE.lookup(entry.key))

    threads = [threading.Thread(target=work, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.key.version for entry in found) == list(range(16))
    assert len(tuning.remembered()) == len(tuning.cache_entries()) == 16


def test_entry_comes_back_whole(world: Any) -> None:
    entry = world.entry(9, best="fixture", provenance={"host": "bench"}, seconds=2e-3)
    tuning.store(entry)
    (file,) = tuning.cache_entries()
    assert file.entry == entry
    assert file.entry.seconds == 2e-3
    assert file.path == world.file_of(entry.key)
    assert (file.entry.timings[1].failure, file.entry.check.error) == ("OOM", 0.25)


@pytest.mark.parametrize("check", [None, tuning.Check(False, 3.0)])
@pytest.mark.parametrize("put", [tuning.store, tuning.remember, lambda entry: tuning.AutotuningResult((entry,))])
def test_unchecked_entries_are_refused(world: Any, check: Any, put: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"for rms_norm/fixture:forward, expected a check against the reference that passed"):
        put(world.entry(9, check=check))
    assert (tuning.cache_entries(), tuning.remembered()) == ([], ())


def _truncated(path: Path) -> None:
    path.write_text(path.read_text()[:100])


def _foreign(path: Path) -> None:
    path.write_text('{"name": "somebody else\'s"}')


def _list(path: Path) -> None:
    path.write_text("[1, 2]")


def _empty(path: Path) -> None:
    path.write_text("")


def _binary(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x95\xff")


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [_truncated, _foreign, _list, _empty, _binary, _deep, _folder]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_a_miss_with_one_warning(world: Any, damage: Callable[[Path], None]) -> None:
    tuning.store(world.entry(9))
    assert world.tier() == "user cache"
    damage(world.file_of(world.key()))
    with pytest.warns(CacheWarning) as caught:
        assert world.run() == world.Blocks(8)
        assert world.run() == world.Blocks(8)
    assert len(caught) == 1
    assert world.tier() == "heuristic"


def _another_key(document: dict[str, Any]) -> None:
    document["entries"][0]["key"]["version"] = 77


def _another_level(document: dict[str, Any]) -> None:
    document["level"] = 99


def _unchecked(document: dict[str, Any]) -> None:
    document["entries"][0]["check"]["passed"] = False


def _two(document: dict[str, Any]) -> None:
    document["entries"] *= 2


def _wrong_field(document: dict[str, Any]) -> None:
    document["entries"][0]["timings"] = "fast"


def _other_knobs(document: dict[str, Any]) -> None:
    document["entries"][0]["config"] = {"rows": 9, "turbo": True}


def _illegal_knob(document: dict[str, Any]) -> None:
    document["entries"][0]["config"] = {"rows": -9}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_another_key, "another key"),
        (_another_level, "level 99"),
        (_unchecked, "failed check"),
        (_two, "2 entries"),
        (_wrong_field, "'fast' in place of list"),
        (_other_knobs, "unknown knob 'turbo'"),
        (_illegal_knob, "must be positive"),
    ],
)
def test_entry_that_does_not_belong_is_a_miss_with_one_warning(world: Any, change: Any, message: str) -> None:
    tuning.store(world.entry(9))
    world.rewrite(world.file_of(world.key()), change)
    with pytest.warns(CacheWarning, match=message) as caught:
        assert world.run() == world.Blocks(8)
        assert world.run() == world.Blocks(8)
    assert len(caught) == 1


@pytest.mark.filterwarnings("default")
def test_file_in_place_of_the_directory(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = world.entry(9)
    blocker = world.directory / "blocker"
    blocker.write_text("mine")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(blocker))
    with pytest.warns(CacheWarning, match="cannot be read") as caught:
        assert world.run() == world.Blocks(8)
        assert world.run() == world.Blocks(8)
    assert len(caught) == 1
    with pytest.warns(CacheWarning, match="cannot be written") as caught:
        assert tuning.store(entry) is False
        assert tuning.store(entry) is False
    assert len(caught) == 1
    assert blocker.read_text() == "mine"
    assert (tuning.cache_entries(), tuning.clear_cache()) == ([], 0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("place", ["os.replace", "os.fsync", "tempfile.mkstemp", "pathlib.Path.mkdir"])
def test_full_or_read_only_disk(world: Any, monkeypatch: pytest.MonkeyPatch, code: int, place: str) -> None:
    entry = world.entry(9)
    tuning.cache_info().directory.mkdir(parents=True)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(place, refuse)
    with pytest.warns(CacheWarning) as caught:
        assert tuning.store(entry) is False
        assert tuning.AutotuningResult((world.entry(10),)).store() == 0
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(
        f"{world.directory / 'cache'} (writing): the tuning cache cannot be written ({os.strerror(code)})"
    )
    assert message.endswith("free space or permit writing there, or let EJKERNEL_CACHE_DIR name another folder")
    assert list(tuning.cache_info().directory.iterdir()) == []
    assert world.run() == world.Blocks(8)
    with tuning.AutotuningResult((entry,)):
        assert (world.run(), world.tier()) == (world.Blocks(9), "overlay (autotuning result)")
    tuning.remember(entry)
    assert (world.run(), world.tier()) == (world.Blocks(9), "memory")


def test_a_miss_asks_the_disk_once(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = world.key()
    reads: list[Path] = []
    read = _store.read
    monkeypatch.setattr(_store, "read", lambda path: reads.append(path) or read(path))
    kernel_registry.refresh()
    for _ in range(5):
        assert _store.USER_CACHE.lookup(key) is None
        assert world.tier() == "heuristic"
    assert reads.count(world.file_of(key)) == 1
    kernel_registry.refresh()
    assert _store.USER_CACHE.lookup(key) is None
    assert reads.count(world.file_of(key)) == 2


_IMPORT = """
import sys, warnings
warnings.simplefilter("error")
import ejkernel
assert "ejkernel.tuning" not in sys.modules and "platformdirs" not in sys.modules
from ejkernel import tuning
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert len(tuning.cache_entries()) == 1
    assert caught == []
"""


def test_import_does_not_look_at_a_damaged_cache(world: Any) -> None:
    tuning.store(world.entry(9))
    _truncated(world.file_of(world.key()))
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_default_directory_is_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.delenv("EJKERNEL_CACHE_DIR", raising=False)
    assert _store.directory() == Path(platformdirs.user_cache_dir("ejkernel")) / "configs-1"


def test_information(world: Any) -> None:
    assert (tuning.cache_info().count, tuning.cache_info().bytes) == (0, 0)
    entry = world.entry(9)
    tuning.store(entry)
    tuning.store(dataclasses.replace(entry, key=dataclasses.replace(entry.key, jax="0.0.1")))
    tuning.store(dataclasses.replace(entry, key=dataclasses.replace(entry.key, version=5)))
    _truncated(world.file_of(dataclasses.replace(entry.key, version=5)))
    info = tuning.cache_info()
    assert info.states == {"ok": 1, "other version": 1, "unreadable": 1}
    assert info.count == 3
    assert info.bytes == sum(path.stat().st_size for path in info.directory.iterdir())
    assert json.loads(json.dumps(info.to_dict()))["directory"] == str(world.directory / "cache" / "configs-1")
    assert {file.to_dict()["state"] for file in tuning.cache_entries()} == {"ok", "other version", "unreadable"}


def test_clear_deletes_its_own_files_only(world: Any, snapshot: Any) -> None:
    entry = world.entry(9)
    for number in range(3):
        tuning.store(dataclasses.replace(entry, key=dataclasses.replace(entry.key, version=number)))
    tuning.store(dataclasses.replace(entry, key=dataclasses.replace(entry.key, operation="softmax")))
    folder = tuning.cache_info().directory
    strangers = [folder / "notes.json", folder / "notes.txt", folder.parent / f"{entry.key.digest}.json"]
    for path in strangers:
        path.write_text("keep")
    (folder / f".{entry.key.digest}.abc.tmp").write_text("left behind")
    assert tuning.clear_cache(state="unreadable") == 0
    assert tuning.clear_cache(operation="softmax") == 1
    assert tuning.clear_cache() == 3
    assert snapshot(world.directory) == {str(path): b"keep" for path in sorted(strangers)}


def test_clearing_takes_effect_at_once(world: Any) -> None:
    tuning.store(world.entry(9))
    assert world.tier() == "user cache"
    tuning.clear_cache()
    assert world.tier() == "heuristic"


def test_export_and_merge(world: Any) -> None:
    entry = world.entry(9)
    other = dataclasses.replace(entry, key=dataclasses.replace(entry.key, operation="softmax"))
    tuning.store(entry)
    tuning.store(other)
    exported = world.directory / "exported.json"
    assert tuning.export_cache(exported, operation="rms_norm") == 1
    assert tuning.export_cache(exported) == 2
    tuning.clear_cache()
    tuning.store(world.entry(3))
    assert tuning.merge_cache(exported) == 1
    assert {file.entry.config["rows"] for file in tuning.cache_entries()} == {3, 9}
    assert tuning.merge_cache(exported, replace=True) == 2
    assert {file.entry.config["rows"] for file in tuning.cache_entries()} == {9}
    world.ship(text=exported.read_text())
    tuning.clear_cache()
    assert world.tier() == "shipped table"


def test_merging_something_else(world: Any) -> None:
    path = world.directory / "other.json"
    path.write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"other\.json: not 'ejkernel tuned configs'"):
        tuning.merge_cache(path)
    assert tuning.cache_entries() == []


def test_a_cache_that_is_not_used_is_not_made(world: Any) -> None:
    world.run()
    ejkernel.explain("rms_norm", world.x)
    assert not (world.directory / "cache").exists()

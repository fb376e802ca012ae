"""Compiled kernels on disk: what is damaged, full or too large."""

from __future__ import annotations

import errno
import os
import warnings

import pytest

from ejkernel.errors import CacheWarning
from ejkernel.utils import kernel_store as _kernel_store, warn_once as _warn
from ejkernel.utils.kernel_store import KernelStore, StoredKernels, clear_kernels, stored_kernels

KEYS = [digit * 64 for digit in "0123456789abcdef"]
STORE = KernelStore("made-up")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_warn, "_said", set())


def test_what_is_put_is_got():
    assert STORE.get(KEYS[0]) is None
    assert not STORE.folder.exists()
    assert STORE.put(KEYS[0], b"first") and STORE.put(KEYS[1], b"")
    assert (STORE.get(KEYS[0]), STORE.get(KEYS[1]), STORE.get(KEYS[2])) == (b"first", b"", None)
    assert STORE.put(KEYS[0], b"second")
    assert STORE.get(KEYS[0]) == b"second"
    assert KernelStore("other").get(KEYS[0]) is None


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b[:20], lambda b: b + b"x", lambda b: b[::-1]])
def test_a_damaged_entry_is_a_miss_and_is_replaced(damage):
    STORE.put(KEYS[0], b"a kernel" * 10)
    (file,) = STORE.folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert STORE.get(KEYS[0]) is None
    STORE.put(KEYS[0], b"again")
    assert STORE.get(KEYS[0]) == b"again"


def test_a_full_disk_gives_one_warning(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(CacheWarning, match="No space left") as caught:
        assert not STORE.put(KEYS[0], b"a") and not STORE.put(KEYS[1], b"b")
    assert len(caught) == 1
    assert list(STORE.folder.iterdir()) == []


def test_a_folder_that_cannot_be_used_gives_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match="compiled again") as caught:
        assert STORE.get(KEYS[0]) is None
        assert not STORE.put(KEYS[0], b"a")
    assert len(caught) == 1
    assert stored_kernels() == StoredKernels(0, 0)


def test_the_least_recently_used_go_first(monkeypatch):
    content = os.urandom(1000)
    for age, key in enumerate(KEYS[:8]):
        STORE.put(key, content)
        os.utime(STORE.folder / f"{key}.kernel", (1000 + age, 1000 + age))
    size = stored_kernels().bytes // 8
    assert STORE.get(KEYS[0]) == content  # used just now
    monkeypatch.setattr(_kernel_store, "MOST_BYTES", 8 * size)
    monkeypatch.setattr(_kernel_store, "_LEFT_AFTER_TRIMMING", 6 * size)
    STORE.put(KEYS[8], content)
    kept = [key for key in KEYS if (STORE.folder / f"{key}.kernel").exists()]
    assert kept == [KEYS[0], *KEYS[4:9]]


def test_clearing_touches_nothing_else():
    STORE.put(KEYS[0], b"a")
    KernelStore("other").put(KEYS[0], b"b")
    others = (STORE.folder / "notes.txt", STORE.folder.parent / "configs-1" / f"{KEYS[0]}.json")
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    left = STORE.folder / f".{KEYS[1]}.abc.tmp"
    left.touch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert clear_kernels() == 2
    assert caught == []
    assert not left.exists() and all(path.exists() for path in others)
    assert stored_kernels() == StoredKernels(0, 0)


def bundle(folder, **contents):
    """A bundle of these kernels, by digit of their key."""
    _kernel_store.collect_in(folder)
    for digit, content in contents.items():
        STORE.put(digit[-1] * 64, content)
    _kernel_store.collect_in(None)
    (folder / _kernel_store.MANIFEST).write_text("{}")
    return folder


@pytest.fixture
def named(monkeypatch):
    return lambda *folders: monkeypatch.setenv(_kernel_store.BUNDLES, os.pathsep.join(map(str, folders)))


def test_bundles_are_read_in_order_after_the_own_folder(tmp_path, named):
    named(bundle(tmp_path / "a", _0=b"a", _1=b"a"), bundle(tmp_path / "b", _1=b"b", _2=b"b"))
    STORE.put(KEYS[0], b"own")
    assert [STORE.get(key) for key in KEYS[:4]] == [b"own", b"a", b"b", None]
    assert len([*STORE.folder.iterdir()]) == 1, "what was read is not copied"
    assert KernelStore("other").get(KEYS[1]) is None
    assert clear_kernels() == 1 and STORE.get(KEYS[2]) == b"b"


def test_a_bundle_serves_where_nothing_can_be_kept(tmp_path, named, monkeypatch):
    named(bundle(tmp_path / "a", _0=b"a"))
    for place in (tmp_path / "a").rglob("*"):
        place.chmod(0o555)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "/proc/nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert STORE.get(KEYS[0]) == b"a"


def test_while_a_bundle_is_made_nothing_else_is_read(tmp_path, named):
    named(bundle(tmp_path / "a", _0=b"a"))
    STORE.put(KEYS[1], b"own")
    _kernel_store.collect_in(tmp_path / "b")
    try:
        assert STORE.get(KEYS[0]) is STORE.get(KEYS[1]) is None
    finally:
        _kernel_store.collect_in(None)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b[::-1]])
def test_a_damaged_bundle_is_said_once_and_the_next_is_asked(damage, tmp_path, named):
    first = bundle(tmp_path / "a", _0=b"a kernel", _1=b"a", _2=b"a")
    named(first, bundle(tmp_path / "b", _0=b"a kernel"))
    for digit in "01":
        file = first / "kernels-made-up" / f"{digit * 64}.kernel"
        file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(CacheWarning, match=r"a: kernels-made-up/0+\.kernel is damaged") as caught:
        assert [STORE.get(key) for key in KEYS[:3]] == [b"a kernel", None, b"a"]
    assert len(caught) == 1


def test_folders_that_are_no_bundle_are_said_once(tmp_path, named):
    (tmp_path / "a").mkdir()
    named(tmp_path / "a", tmp_path / "missing", bundle(tmp_path / "b", _0=b"b"))
    with pytest.warns(CacheWarning, match=r"no bundle of kernels: bundle\.json: No such file") as caught:
        assert (STORE.get(KEYS[0]), STORE.get(KEYS[1])) == (b"b", None)
    assert len(caught) == 2


@pytest.mark.skipif(os.name == "nt", reason="folders are closed by other means on Windows")
@pytest.mark.parametrize("opened", ["", "kernels-made-up", f"kernels-made-up/{KEYS[0]}.kernel", "bundle.json"])
def test_a_bundle_that_others_can_write_to_is_not_used(opened, tmp_path, named):
    folder = bundle(tmp_path / "a", _0=b"a")
    (folder / opened).chmod(0o777)
    named(folder)
    with pytest.warns(CacheWarning, match="others than its owner can write to it"):
        assert STORE.get(KEYS[0]) is None


def test_installed_bundles_are_found(tmp_path, monkeypatch):
    for site, digit in (("one", "0"), ("two", "1")):
        bundle(tmp_path / site / _kernel_store.BUNDLED / site, **{digit: site.encode()})
        monkeypatch.syspath_prepend(str(tmp_path / site))
    assert len(_kernel_store.bundles()) == 2
    assert [STORE.get(key) for key in KEYS[:3]] == [b"one", b"two", None]

"""Where the cache lies, and what in it is read."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pytest

from ejkernel.configs import store as configs
from ejkernel.errors import CacheWarning
from ejkernel.utils import warn_once
from ejkernel.utils.cache_folder import UntrustedError, all_distrusted, cache_folder, distrust, read_file, replace_file
from ejkernel.utils.kernel_store import KernelStore, StoredKernels, clear_kernels, stored_kernels


def test_a_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "~/somewhere")
    assert cache_folder() == Path.home() / "somewhere"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a system with named pipes")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_only_regular_files_are_read(tmp_path, make):
    make(tmp_path / "entry")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        read_file(tmp_path / "entry")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a system with named pipes")
def test_a_pipe_in_place_of_a_kernel_is_a_miss(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    store = KernelStore("piped")
    store.folder.mkdir()
    os.mkfifo(store.folder / f"{'0' * 64}.kernel")
    with pytest.warns(CacheWarning, match="not a regular file"):
        assert store.get("0" * 64) is None


def test_what_is_there_is_read(tmp_path):
    (tmp_path / "entry").write_bytes(b"content")
    assert read_file(tmp_path / "entry") == b"content"


# Who else can write there

posix = pytest.mark.skipif(os.name != "posix", reason="needs owners and modes of files")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A cache folder that is not there yet, and no warning said before."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(warn_once, "_said", set())
    return cache_folder()


def open_up(path, monkeypatch):
    path.chmod(path.stat().st_mode | 0o002)


def open_to_group(path, monkeypatch):
    path.chmod(path.stat().st_mode | 0o020)


def give_away(path, monkeypatch):
    """Another user's: only root can give files away, and only others notice what is root's neighbour's."""
    owner = path.stat().st_uid
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
        return
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)


SPOILT = {"world-writable": open_up, "group-writable": open_to_group, "another user's": give_away}


@posix
def test_what_we_make_is_closed_to_others(root):
    before = os.umask(0)
    try:
        assert KernelStore("made-up").put("0" * 64, b"code")
        assert configs.write(configs.directory(), "1" * 64, "{}")
    finally:
        os.umask(before)
    made = [root.parent, root, *root.rglob("*")]
    assert len(made) == 6
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert all_distrusted() == []


@posix
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("what", ["folder", "file"])
def test_code_that_others_can_write_is_absent(root, monkeypatch, spoil, what):
    store, key = KernelStore("made-up"), "0" * 64
    assert store.put(key, b"code") and store.get(key) == b"code"
    place = store.folder if what == "folder" else store.folder / f"{key}.kernel"
    content = (store.folder / f"{key}.kernel").read_bytes()
    spoil(place, monkeypatch)
    with pytest.warns(CacheWarning, match=r"not used, as .* can write to it.*EJKERNEL_CACHE_DIR") as caught:
        assert store.get(key) is None
        assert store.get(key) is None
        written = [store.put(key, b"mine"), store.put("1" * 64, b"mine")]
    first = root if spoil is give_away and os.geteuid() else place  # where the user changed, everything is another's
    assert [str(w.message).partition(":")[0] for w in caught] == [str(first)]
    if what == "folder" or first == root:
        assert written == [False, False]
        assert (store.folder / f"{key}.kernel").read_bytes() == content
        assert (stored_kernels(), clear_kernels()) == (StoredKernels(0, 0), 0)
    else:
        assert written == [True, True] and store.get(key) == b"mine"  # in its place, a file of one's own


@posix
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_one_warning_for_all_stores(root, monkeypatch, spoil):
    stores = [KernelStore("one"), KernelStore("two")]
    for store in stores:
        store.put("0" * 64, b"code")
    if spoil is give_away:
        spoil(root, monkeypatch)
        with pytest.warns(CacheWarning) as caught:
            assert [store.get("0" * 64) for store in stores] == [None, None]
            assert not configs.write(configs.directory(), "1" * 64, "{}")
        assert len(caught) == 1
        return
    spoil(root, monkeypatch)  # as a mounted volume may be: what lies below is checked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [store.get("0" * 64) for store in stores] == [b"code", b"code"]


@posix
def test_what_root_owns_is_trusted(root, monkeypatch):
    KernelStore("made-up").put("0" * 64, b"code")
    state = root.stat()
    monkeypatch.setattr(os, "geteuid", lambda: state.st_uid + 1)
    assert (distrust(root) is None) == (state.st_uid == 0)


@posix
def test_a_link_that_another_user_made_is_not_followed(root, tmp_path, monkeypatch):
    own = tmp_path / "downloads"
    own.mkdir(mode=0o700)
    root.mkdir(parents=True, mode=0o700)
    (root / "kernels-made-up").symlink_to(own)
    assert KernelStore("made-up").put("0" * 64, b"code") and distrust(root / "kernels-made-up") is None
    if os.geteuid() == 0:
        os.chown(root / "kernels-made-up", 54321, -1, follow_symlinks=False)
    else:
        lstat = Path.lstat
        monkeypatch.setattr(
            Path, "lstat", lambda path: os.stat_result((*lstat(path)[:4], os.geteuid() + 1, *lstat(path)[5:10]))
        )
    with pytest.warns(CacheWarning, match="not used"):
        assert KernelStore("made-up").get("0" * 64) is None


@posix
def test_a_refusal_is_told_from_a_fault(root):
    root.mkdir(parents=True)
    (folder := root / "configs-1").mkdir()
    folder.chmod(0o777)
    with pytest.warns(CacheWarning), pytest.raises(UntrustedError):
        replace_file(folder / "entry", b"content")
    assert list(folder.iterdir()) == []


@posix
def test_everything_that_is_not_used_is_listed(root):
    for name in ("configs-1", "kernels-made-up", "quarantine-1/abc", "strangers"):
        (root / name).mkdir(parents=True, mode=0o700)
    KernelStore("made-up").put("0" * 64, b"code")
    places = [root / "configs-1", root / "kernels-made-up" / f"{'0' * 64}.kernel", root / "quarantine-1" / "abc"]
    for path in (*places, root / "strangers"):
        path.chmod(0o777)
    (root / "quarantine-1").chmod(0o700)
    assert [one.place for one in all_distrusted()] == places
    assert "(mode 0777)" in str(all_distrusted()[0])

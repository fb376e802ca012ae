"""Where the cache lies, and what in it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ejkernel.errors import CacheWarning
from ejkernel.utils.cache_folder import cache_folder, read_file
from ejkernel.utils.kernel_store import KernelStore


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

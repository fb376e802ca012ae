"""For every suite: annotations are checked at run time, nothing is promoted implicitly, and a CPU shows eight devices. `--extent`,
which the conformance suite's plugin defines, says how much runs.

quick: one in eight of similar parametrised tests. standard: all of them. full: the slow tests too. `--compiled=FOLDER` keeps what
XLA compiles, for all processes of a run and for later ones.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("EJKERNEL_TYPECHECK", "1")

pytest_plugins = ["ejkernel.testing.plugin", "pytester"]

_QUICK = 8
"""One in so many of similar tests, outside of the conformance suite, which has its own sample."""

_OF_ONE_PLATFORM = {"tests/conformance": None, "tests/opaque": "opaque", "examples/acme-ejkernel": "acme"}
"""Folders that are run on the platform that `--ejkernel-platform` names, and which that must be; None for any."""

_OF_ONE_DISTRIBUTION = {
    "benchmarks/tests": ("ejkernel_bench", "./benchmarks"),
    "examples/demo/tests": ("ejkernel_demo", "./examples/demo"),
}
"""Folders whose tests need a package, and where it is installed from."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compiled", type=Path, help="read compiled programs from this folder, and keep new ones there")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without their platform or package these folders are passed over, and refused where the command line asks for them."""
    folder = collection_path.relative_to(config.rootpath).as_posix() if collection_path.is_relative_to(config.rootpath) else ""
    if any(folder.startswith(one) and _is_missing(one) for one in _OF_ONE_DISTRIBUTION):
        return True
    if folder not in _OF_ONE_PLATFORM:
        return None
    platform, needed = config.getoption("--ejkernel-platform"), _OF_ONE_PLATFORM[folder]
    return True if platform is None or needed not in (None, platform) else None


def _is_missing(folder: str) -> bool:
    return importlib.util.find_spec(_OF_ONE_DISTRIBUTION[folder][0]) is None


def pytest_report_header() -> list[str]:
    passed_over = [(folder, path) for folder, (_, path) in _OF_ONE_DISTRIBUTION.items() if _is_missing(folder)]
    return [f"passed over: {folder}, which needs: pip install --editable {path}" for folder, path in passed_over]


def pytest_configure(config: pytest.Config) -> None:
    from ejkernel.testing.settings import host_devices, promote_nothing  # as below

    host_devices()
    config.add_cleanup(promote_nothing())
    if (folder := config.getoption("--compiled")) is not None:
        _keep_compiled(Path(config.invocation_params.dir, folder))
    named = config.args if config.args_source is config.ArgsSource.ARGS else []
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in named]
    for folder, (package, path) in _OF_ONE_DISTRIBUTION.items():
        if any(one.is_relative_to(config.rootpath / folder) for one in asked) and _is_missing(folder):
            raise pytest.UsageError(f"{folder} needs {package}; run: pip install --editable {path}")
    for folder, needed in _OF_ONE_PLATFORM.items():
        here = any(path.is_relative_to(config.rootpath / folder) for path in asked)
        if here and config.getoption("--ejkernel-platform") is None:
            raise pytest.UsageError(f"{folder} is run on one platform; add --ejkernel-platform={needed or 'xla'}")


def _keep_compiled(folder: Path) -> None:
    """JAX's persistent cache: a program is read that this compiler has made of the same code with the same flags.

    In this process only. Processes that tests start may be about caches, or be killed while they write.
    """
    import jax
    from jax._src import lru_cache  # the class that writes its files

    settings = {"compilation_cache_dir": str(folder), "persistent_cache_min_compile_time_secs": 0}
    for name, value in {**settings, "persistent_cache_min_entry_size_bytes": -1}.items():
        jax.config.update(f"jax_{name}", value)

    def put(cache: Any, key: str, value: bytes) -> None:
        """In one step: JAX writes bit by bit, and other processes would read a part."""
        file = Path(cache.path) / f"{key}-cache"
        if not file.exists():
            part = file.with_name(f"{os.getpid()}-{threading.get_ident()}")
            part.write_bytes(value)
            part.replace(file)

    lru_cache.LRUCache.put = put


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run in full, and where the command line names tests or marks."""
    from ejkernel.testing.extent import keep, sampled  # not above: no conftest has set up the environment yet

    extent = config.getoption("--extent")
    own = [item for item in items if item.get_closest_marker("ejkernel_level") is None]
    wanted = {*(sampled(own, _QUICK) if extent == "quick" else own)}
    named = config.getoption("-m") or any("::" in argument for argument in config.args)
    if extent != "full" and not named:
        wanted = {item for item in wanted if item.get_closest_marker("slow") is None}
    left_out = {*own} - wanted
    keep(config, items, [item for item in items if item not in left_out])

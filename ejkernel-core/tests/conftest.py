"""Fixtures of core's unit tests."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from ejkernel import kernel_registry
from ejkernel.operations.rms_norm.interface import RmsNormInputs, RmsNormOutputs


@dataclasses.dataclass
class Site:
    """A directory of made-up installed distributions."""

    path: Path

    def add(
        self,
        distribution: str,
        entries: str,
        modules: dict[str, str],
        *,
        version: str = "1.0",
        metadata: bool = True,
        group: str = "ejkernel.plugins",
    ) -> Path:
        """Write a distribution's metadata and modules; returns its dist-info directory."""
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if entries:
            (info / "entry_points.txt").write_text(f"[{group}]\n{entries}\n")
        for name, code in modules.items():
            file = self.path / f"{name.replace('.', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(code))
        return info

    def plugin(self, platform: str, distribution: str = "", *, version: str = "1.0", code: str = "", **fields: str) -> Path:
        """A distribution with one plugin; `fields` are source code of `Plugin`'s arguments, `code` goes to the end."""
        arguments = {"name": repr(platform), "api_level": "1", "summary": "'made up'", **fields}
        written = ", ".join(f"{key}={value}" for key, value in arguments.items())
        module = f"from ejkernel.plugin import *\n\n@hookimpl\ndef ejkernel_plugin():\n    return Plugin({written})\n\n{code}\n"
        entry = f"{platform} = {platform}_light"
        return self.add(distribution or f"ejk-{platform}", entry, {f"{platform}_light": module}, version=version)

    def core(self) -> None:
        """Core's own metadata, as far as its operations are found by it."""
        self.add("ejkernel-core", "core = ejkernel.operations._plugin", {}, group="ejkernel.operations")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty directory for made-up distributions."""
    (tmp_path / "site").mkdir()
    return Site(tmp_path / "site")


@pytest.fixture
def sealed(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The made-up distributions as the only ones on this process's path, with no setting in the environment."""
    importlib.import_module("packaging.specifiers")  # lives outside of the path below
    site.core()
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    monkeypatch.setattr(sys, "path", [str(site.path), *standard])
    for setting in ("EJKERNEL_PLUGINS", "EJKERNEL_STRICT"):
        monkeypatch.delenv(setting, raising=False)
    before = {*sys.modules}
    importlib.invalidate_caches()
    yield site
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.fixture
def python(site: Site):
    """Run code in a fresh interpreter that sees the made-up distributions before the installed ones; returns its output."""

    def run(code: str, *, fails: bool = False, **environment: str) -> str:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("EJKERNEL_")}
        path = os.pathsep.join(filter(None, (str(site.path), inherited.get("PYTHONPATH", ""))))
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**inherited, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
            cwd=site.path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(result.returncode) == fails, result.stdout + result.stderr
        return result.stdout + result.stderr

    return run


def plain_forward(call: Any, inputs: RmsNormInputs, config: Any) -> RmsNormOutputs:
    """rms_norm without offset, float32, for tests of the machinery."""
    rstd = 1 / jnp.sqrt(jnp.mean(inputs.x**2, -1) + call.epsilon)
    scale = 1.0 if inputs.scale is None else inputs.scale.reshape(-1, *[1] * (inputs.x.ndim - 2), inputs.x.shape[-1])
    return RmsNormOutputs(inputs.x * rstd[..., None] * scale, rstd if call.save_residuals else None)


@pytest.fixture
def registered() -> Iterator[Callable[..., list[Any]]]:
    """`registered(platform, **record)` registers a recording rms_norm forward and returns the list of calls it traced."""
    added: list[tuple[str, str]] = []

    def add(platform: str, **record: Any) -> list[Any]:
        traced: list[Any] = []

        def forward(call: Any, inputs: Any, config: Any) -> Any:
            traced.append(call)
            return plain_forward(call, inputs, config)

        kernel_registry.register("rms_norm", platform, **record)(forward)
        added.append((platform, record.get("variant", "")))
        return traced

    yield add
    for platform, variant in added:
        kernel_registry.unregister("rms_norm", platform, variant=variant)

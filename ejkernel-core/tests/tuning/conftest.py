"""An implementation of `rms_norm` that notes which configs it is traced with, and a tuning cache of its own for every test."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import kernel_registry, tuning
from ejkernel._plugins.records import PluginRecord
from ejkernel.configs.entry import dump_entries
from ejkernel.operations.rms_norm.interface import RmsNormInputs, RmsNormOutputs
from ejkernel.plugin import ConfigSpace
from ejkernel.utils import warn_once as _warn


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Knobs of the fixture's forward."""

    rows: int = 8
    warps: int = 4

    def __post_init__(self) -> None:
        if self.rows <= 0:
            raise ValueError(f"rows must be positive, not {self.rows}")


@dataclasses.dataclass(frozen=True)
class GradBlocks:
    """Knobs of the fixture's backward."""

    columns: int = 16
    warps: int = 2


@dataclasses.dataclass(frozen=True)
class Strange:
    """Knobs of nothing that is installed."""

    turbo: bool = True


class World:
    """The fixture implementation and everything that tests ask of it. `rows` is what its search space holds."""

    Blocks, GradBlocks, Strange = Blocks, GradBlocks, Strange

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: list[Any] = []
        self.rows = tuple(rows for rows in range(1, 21) if rows != 7)
        self.space = ConfigSpace(Blocks, lambda call, target: Blocks(), lambda call, target: [Blocks(r) for r in self.rows])
        self.grad_space = ConfigSpace(GradBlocks, lambda call, target: GradBlocks(), lambda call, target: [GradBlocks()])
        self.undo: list[Callable[[], None]] = []
        self.tables: list[PluginRecord] = []
        self.x = jnp.arange(12.0).reshape(3, 4)

    def register(self, phase: Any = "forward", configs: Any = "default", platform: str = "fixture", **record: Any) -> None:
        spaces = {"forward": self.space, "backward": self.grad_space}
        record.setdefault("priority", 1000)
        kernel_registry.register(
            "rms_norm", platform, phase=phase, configs=spaces[phase] if configs == "default" else configs, **record
        )(self._forward if phase == "forward" else self._backward)
        variant = record.get("variant", "")
        self.undo.append(lambda: kernel_registry.unregister("rms_norm", platform, phase=phase, variant=variant))

    def _forward(self, call: Any, inputs: Any, config: Any) -> RmsNormOutputs:
        self.seen.append(config)
        rstd = jax.lax.rsqrt(jnp.mean(inputs.x**2, axis=-1) + call.epsilon)
        return RmsNormOutputs(inputs.x * rstd[..., None], rstd if call.save_residuals else None)

    def _backward(self, call: Any, inputs: Any, outputs: Any, cotangents: Any, config: Any) -> RmsNormInputs:
        self.seen.append(config)
        rstd = outputs.rstd[..., None]
        normal = inputs.x * rstd
        grad = cotangents.out
        return RmsNormInputs(rstd * (grad - normal * jnp.mean(grad * normal, axis=-1, keepdims=True)))

    def run(self, x: Any = None, **options: Any) -> Any:
        """Trace one forward call afresh; the config that the fixture ran with."""
        kernel_registry.refresh()
        self.seen.clear()
        ejkernel.rms_norm(self.x if x is None else x, **options)
        assert len(self.seen) == 1
        return self.seen[0]

    def grad(self, **options: Any) -> list[Any]:
        """Trace one gradient afresh; the configs that forward under differentiation and backward ran with."""
        kernel_registry.refresh()
        self.seen.clear()
        jax.grad(lambda x: ejkernel.rms_norm(x, **options).sum())(self.x)
        return self.seen[-2:]

    def tier(self, x: Any = None, phase: str = "forward", **options: Any) -> str:
        """What `explain` says."""
        return getattr(ejkernel.explain("rms_norm", self.x if x is None else x, **options), phase).tier

    def key(self, x: Any = None, implementation: str = "fixture", phase: str = "forward") -> tuning.Key:
        """The key of the fixture for a call."""
        decision = getattr(ejkernel.explain("rms_norm", self.x if x is None else x, platform=implementation), phase)
        x = self.x if x is None else x
        (call,) = tuning.record_calls(lambda x: ejkernel.rms_norm(x, platform=implementation), x)
        request = dataclasses.replace(call.request, call=decision.call)
        return tuning.Key.of(request, decision.phase, decision.chosen)

    def entry(self, rows: int | None, x: Any = None, seconds: float = 1e-3, **fields: Any) -> tuning.Entry:
        """A checked entry that asks for this many rows."""
        config = None if rows is None else tuning.to_plain(Blocks(rows))
        fields.setdefault("check", tuning.Check(True, 0.25))
        fields.setdefault("timings", (tuning.Timing(config, (seconds, seconds)), tuning.Timing({"rows": 64}, failure="OOM")))
        return tuning.Entry(fields.pop("key", None) or self.key(x), config, **fields)

    def ship(
        self, *entries: tuning.Entry, name: str = "fixture", distribution: str = "ejkernel-fixture", text: Any = None
    ) -> Path:
        """Install a plugin that ships a table of these entries."""
        path = self.directory / f"table-{len(self.tables)}.json"
        path.write_text(dump_entries(entries) if text is None else text)
        record = PluginRecord(name, distribution, "1.0", "fixture_plugin", "ok", tables=(str(path),))
        self.tables.append(record)
        kernel_registry.load([*kernel_registry.records, record])
        return path

    def file_of(self, key: tuning.Key) -> Path:
        return tuning.cache_info().directory / f"{key.digest}.json"

    def rewrite(self, path: Path, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the JSON document of a file."""
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The fixture implementation, forward only, and an empty cache."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_warn, "_said", set())
    records = kernel_registry.records
    made = World(tmp_path)
    made.register()
    yield made
    for undo in made.undo:
        undo()
    tuning.forget()
    tuning.install_tuner(None)
    kernel_registry.load(records)


@pytest.fixture
def snapshot() -> Callable[[Path], Mapping[str, bytes]]:
    """Everything below a folder, by path."""

    def take(folder: Path) -> Mapping[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    return take

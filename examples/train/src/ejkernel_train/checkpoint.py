"""Orbax checkpoints of everything that a step changes, so that a resumed run continues as if it had never stopped.

Each has a file with the SHA-256 of all its others, and with the run's settings. Orbax itself, and TensorStore below it, read arrays
with flipped bits without a word.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")

SEAL = "checksums.json"
"""In the folder of a checkpoint: its files with their SHA-256, and the run's settings."""

SIZES = "sizes"
"""Of the settings: the fields of the run's `ModelConfig`, which arrays are compared by and not these."""

DECISIVE = ("--model", "--size", "--repeats", "--float8")
"""Settings without which a checkpoint's arrays are no state of the run; others change how the run goes on."""


class DamagedError(ValueError):
    """No checkpoint of a folder is whole."""


class Checkpoints:
    """A folder of checkpoints by the number of their step, a context. Needs Orbax: `pip install ejkernel-train[checkpoints]`."""

    def __init__(self, folder: Path, keep: int = 2, settings: Mapping[str, Any] | None = None) -> None:
        """`keep`: the newest ones; at least 2, as the newest may turn out to be of a run that diverges. `settings`: by option.

        Raises:
            ValueError: `keep` is below 2.
        """
        import orbax.checkpoint as ocp

        if keep < 2:
            raise ValueError(f"keep is {keep}; give at least 2")
        self._args, self._folder, self._settings = ocp.args, folder.absolute(), settings
        self._damaged: list[int] = []
        self._sealing: threading.Thread | None = None
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(self._folder, item_handlers=ocp.StandardCheckpointHandler(), options=options)

    def save(self, step: int, state: Any) -> None:
        """Writes in the background; leaving the context waits for it."""
        self._wait()
        self._move_damaged(step)
        saved = self._manager.save(step, args=self._args.StandardSave(_named(state)))
        if saved and not jax.process_index():
            self._sealing = threading.Thread(target=self._seal, args=(step,), name="ejkernel-train-seal")
            self._sealing.start()

    def steps(self) -> list[int]:
        """Those that are there, damaged or not, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def saved_settings(self) -> dict[str, Any]:
        """Those of the newest checkpoint that has any."""
        for step in self.steps():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return json.loads((self._folder / str(step) / SEAL).read_text())["settings"]
        return {}

    def restore(self, state: Tree, *others: Tree) -> Tree:
        """The newest whole checkpoint with the shapes, dtypes and shardings of `state`, or of one of the `others`, which may be
        abstract, if its arrays have their names and shapes; `state` itself if there is none at all.

        Says on stderr which ones are damaged, and which of the run's settings are not those of the checkpoint.

        Raises:
            DamagedError: all are damaged.
            ValueError: the newest whole one is of another model.
        """
        problems: list[str] = []
        for step in self.steps():
            problem, seal = self._damage(step)
            if problem is None:
                self._compare(step, seal)
                problem, found = self._read(step, self._form(step, (state, *others)), sealed=seal is not None)
                if problem is None:
                    for each in problems:
                        _warn(f"{each}; going on from step {step}")
                    return found
            self._damaged.append(step)
            problems.append(f"the checkpoint {self._folder / str(step)} is damaged: {problem}")
        if problems:
            raise DamagedError("; ".join([*problems, "there is no other"]))
        return state

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self._manager.close()

    def _wait(self) -> None:
        """Until what is being saved is there."""
        self._manager.wait_until_finished()
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None

    def _read(self, step: int, state: Tree, *, sealed: bool) -> tuple[str | None, Tree]:
        """What is wrong with a checkpoint, and the state in it."""
        shapes = jax.tree.map(_abstract, _named(state))
        try:
            found = self._manager.restore(step, args=self._args.StandardRestore(shapes))
        except Exception as error:
            said = (str(error).splitlines() or [repr(error)])[0]
            if not sealed:
                return f"it has no {SEAL}, and cannot be read: {said}", state
            if isinstance(error, (KeyError, TypeError, ValueError)):
                raise ValueError(f"the checkpoint {self._folder / str(step)} is of another model: {said}") from error
            raise
        if not sealed:
            _warn(f"the checkpoint of step {step} has no {SEAL}, so damage of its arrays would not be noticed")
        return None, jax.tree.unflatten(jax.tree.structure(state), [found[name] for name in _named(state)])

    def _form(self, step: int, forms: tuple[Tree, ...]) -> Tree:
        """The one with the names and shapes of the checkpoint's arrays, or the first."""
        try:
            stored = {name: tuple(leaf.shape) for name, leaf in self._manager.item_metadata(step).items()}
        except Exception:  # noqa: BLE001 reading the arrays will say what is wrong
            return forms[0]
        fits = (form for form in forms if {name: tuple(leaf.shape) for name, leaf in _named(form).items()} == stored)
        return next(fits, forms[0])

    def _seal(self, step: int) -> None:
        """Write the sums of a checkpoint when Orbax has written it."""
        try:
            self._manager.wait_until_finished()
        except Exception:  # noqa: BLE001 who waits for it in the main thread gets the error, too
            return
        folder = self._folder / str(step)
        seal = {"settings": dict(self._settings or {}), "files": {name: _sum(folder / name) for name in _files(folder)}}
        new = folder / f"{SEAL}.new"
        new.write_text(json.dumps(seal, indent=1) + "\n")
        new.replace(folder / SEAL)

    def _damage(self, step: int) -> tuple[str | None, dict[str, Any] | None]:
        """What is wrong with a checkpoint, and what its seal says; None where there is no problem, or no seal."""
        folder = self._folder / str(step)
        try:
            seal: dict[str, Any] = json.loads((folder / SEAL).read_text())
            files: dict[str, str] = seal["files"]
        except FileNotFoundError:
            return None, None  # of a run that was killed as it wrote it, or that did not write any
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{SEAL} cannot be read: {error}", None
        for name, wanted in files.items():
            try:
                if _sum(folder / name) != wanted:
                    return f"{name} is not what was written", None
            except OSError as error:
                return f"{name}: {error.strerror}", None
        return None, seal

    def _compare(self, step: int, seal: dict[str, Any] | None) -> None:
        """Say which settings are others than those of a checkpoint.

        Raises:
            ValueError: one without which the arrays do not fit.
        """
        if seal is None or self._settings is None:
            return
        for option, was in seal.get("settings", {}).items():
            now = self._settings.get(option, was)
            if now == was or option == SIZES:
                continue
            message = f"the checkpoint of step {step} is of a run with {option} {was}, and this one has {now}"
            if option in DECISIVE:
                raise ValueError(f"{message}; give the same, or another folder")
            _warn(f"{message}; from here on its losses are not those of one run")

    def _move_damaged(self, step: int) -> None:
        """Out of the way of a new checkpoint: Orbax writes none that is older than the newest."""
        aside = [each for each in self._damaged if each >= step]
        for each in aside if jax.process_index() == 0 else ():
            number = 0
            while (target := self._folder / f"damaged-{each}{f'-{number}' if number else ''}").exists():
                number += 1
            os.replace(self._folder / str(each), target)
        if aside:
            if jax.process_count() > 1:
                from jax.experimental import multihost_utils

                multihost_utils.sync_global_devices("damaged checkpoints are out of the way")
            self._damaged = [each for each in self._damaged if each < step]
            self._manager.reload()


def _named(state: Any) -> dict[str, Any]:
    """Arrays by their path, `.model.blocks[0].mixer.query.weight`, so that a checkpoint can be read without this package."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _abstract(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Where no sharding is given, on the first device: Orbax would ask for those that it was saved from."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _files(folder: Path) -> list[str]:
    """All but the seal, and its beginning that a killed run left."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if path.name not in (SEAL, f"{SEAL}.new"))


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _warn(message: str) -> None:
    if not jax.process_index():
        print(f"warning: {message}", file=sys.stderr, flush=True)

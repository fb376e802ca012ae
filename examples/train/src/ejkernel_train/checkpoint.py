"""Orbax checkpoints of everything that a step changes, so that a resumed run continues as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


class Checkpoints:
    """A folder of checkpoints by the number of their step, a context. Needs Orbax: `pip install ejkernel-train[checkpoints]`."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        import orbax.checkpoint as ocp

        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: Any) -> None:
        """Writes in the background; leaving the context waits for it."""
        self._manager.save(step, args=self._args.StandardSave(_named(state)))

    def restore(self, state: Tree) -> Tree:
        """The newest checkpoint with the shapes, dtypes and shardings of `state`; `state` itself if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return state
        shapes = jax.tree.map(_abstract, _named(state))
        found = self._manager.restore(step, args=self._args.StandardRestore(shapes))
        return jax.tree.unflatten(jax.tree.structure(state), [found[name] for name in _named(state)])

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _named(state: Any) -> dict[str, Any]:
    """Arrays by their path, `.model.blocks[0].mixer.query.weight`, so that a checkpoint can be read without this package."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

"""How parameters and activations lie on a mesh of four axes: one table, and XLA adds the collectives.

"data" splits the batch. "fsdp" splits the batch and, in memory, the parameters, which are gathered block by block where they are
used. "expert" splits the batch and the experts of a mixture. "tensor" splits heads, hidden channels and the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

Tree = TypeVar("Tree")

AXES = ("data", "fsdp", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")

RULES: tuple[tuple[str, P], ...] = (
    (r"(embedding|head)", P("tensor", "fsdp")),
    (r"(query|key|value|gate|up)\.weight", P("fsdp", "tensor")),
    (r"(output|down)\.weight", P("tensor", "fsdp")),
    (r"(mixed|z|beta|decay|step|router|share)\.weight", P("fsdp", None)),
    (r"feed_forward\.(gate|up)_bias", P("expert", "tensor")),
    (r"feed_forward\.down_bias", P("expert", None)),
    (r"feed_forward\.(gate|up)", P("expert", "fsdp", "tensor")),  # of experts
    (r"feed_forward\.down", P("expert", "tensor", "fsdp")),
)
"""By the end of a parameter's name, without the axis over which blocks are stacked. Others, all small, are on every device."""


def spec_of(name: str, axes: int) -> P:
    """Of a leaf of the state, by its name, as `.moments[1].mu.blocks[0].mixer.query.weight`, and how many axes it has."""
    found = next((spec for ending, spec in RULES if re.search(rf"\.{ending}$", name)), P())
    return P(None, *found) if found and axes > len(found) else found


def placed(batch: Any, sharding: Any) -> Any:
    """The arrays of a batch, of which every process has the whole and gives its devices their part; as they are without a mesh."""

    def place(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(rows.shape, sharding, lambda part: rows[part])

    return batch if sharding is None else jax.tree.map(place, batch)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with the axes of `AXES`, or None for one device.

    Attributes:
        typed: whether JAX tracks over which axes values of `on_each_device` differ. Kernels of others lack these types.
    """

    mesh: Mesh | None = None
    typed: bool = True

    @staticmethod
    def parse(text: str) -> Layout:
        """Of "data=2,fsdp=2,tensor=2"; axes that are left out have one device, "" means no mesh.

        Raises:
            ValueError: an unknown axis, or more devices than there are.
        """
        if not text:
            return Layout()
        sizes = dict.fromkeys(AXES, 1)
        for part in text.split(","):
            axis, _, size = part.partition("=")
            if axis not in AXES or not size.isdecimal() or int(size) < 1:
                raise ValueError(f"--mesh has {part!r}; write AXIS=DEVICES with an axis of {', '.join(AXES)}")
            sizes[axis] = int(size)
        number, devices = math.prod(sizes.values()), jax.devices()
        if number > len(devices):
            raise ValueError(f"--mesh {text} needs {number} devices, and there are {len(devices)}")
        return Layout(Mesh(np.array(devices[:number]).reshape(*sizes.values()), AXES))

    def shardings(self, state: Any) -> Any:
        """One for every leaf, None without a mesh."""
        mesh = self.mesh
        if mesh is None:
            return None

        def sharding(path: Any, leaf: jax.Array) -> NamedSharding:
            return NamedSharding(mesh, spec_of(jax.tree_util.keystr(path), leaf.ndim))

        return jax.tree_util.tree_map_with_path(sharding, state)

    def batch(self) -> Any:
        """The sharding of arrays whose first axis is the batch, None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(BATCH))

    def gathered(self, block: Tree) -> Tree:
        """Parameters of one block as its products read them: whole along "fsdp"."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._whole(jax.tree_util.keystr(path), leaf), block)

    def _whole(self, name: str, leaf: jax.Array) -> jax.Array:
        return self.constrain(leaf, *(None if axis == "fsdp" else axis for axis in spec_of(name, leaf.ndim)))

    def stream(self, x: jax.Array) -> jax.Array:
        """Activations `[B, T, d]`, split along the batch alone."""
        return self.constrain(x, BATCH)

    def gathered_embedding(self, embedding: jax.Array) -> jax.Array:
        """`[V, d]`, split along the vocabulary alone."""
        return self._whole(".embedding", embedding)

    def logits(self, logits: jax.Array) -> jax.Array:
        """`[B, T, V]`, split along the batch and the vocabulary."""
        return self.constrain(logits, BATCH, None, "tensor")

    def on_each_device(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function of what one device has, written with the collectives below; without a mesh that is everything."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=self.typed)

    @property
    def expert_devices(self) -> int:
        """Into how many parts the experts are split."""
        return 1 if self.mesh is None else self.mesh.shape["expert"]

    def of_all_expert_devices(self, rows: jax.Array) -> jax.Array:
        """The rows of all devices along "expert"."""
        return rows if self.expert_devices == 1 else jax.lax.all_gather(rows, "expert", tiled=True)

    def held_here(self, experts: jax.Array, held: int) -> jax.Array:
        """Numbers of experts, counted from the first of the `held` ones that this device has."""
        return experts if self.expert_devices == 1 else experts - held * jax.lax.axis_index("expert")

    def sum_over_experts(self, rows: jax.Array) -> jax.Array:
        """This device's share of the rows, summed over the devices along "expert"."""
        return rows if self.expert_devices == 1 else jax.lax.psum_scatter(rows, "expert", tiled=True)

    def mean_over_batch(self, tree: Tree) -> Tree:
        return tree if self.mesh is None else jax.lax.pmean(tree, BATCH)

    def part_of_tensor(self, x: jax.Array) -> jax.Array:
        """What summed over the devices along "tensor" is x."""
        return x if self.mesh is None else x / self.mesh.shape["tensor"]

    def sum_over_tensor(self, x: jax.Array) -> jax.Array:
        return x if self.mesh is None else jax.lax.psum(x, "tensor")

    def constrain(self, x: jax.Array, *axes: Any) -> jax.Array:
        return x if self.mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))

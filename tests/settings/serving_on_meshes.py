"""Every serving function over two devices, forward and gradient, along each axis that may be split: a program of its own, because
what goes wrong here ends the process in XLA's compiler.

    python serving_on_meshes.py Explicit|Auto|shard_map|unchecked [FUNCTION ...]

Prints what it runs before it does, and `done` at the end.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
}

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from public_calls import SERVING, PublicCall
from same_results import check, expected, results

HEADS = ("h", "k", "f")
"""Named axes that are split together."""

RESULTS = {
    "page_attention": ("r h d",),
    "prefill_page_attention": ("n h d",),
    "unified_attention": ("n h d",),
    "decode_attention": ("r h d", "r h"),
    "ragged_decode_attention": ("b h d",),
    "ragged_page_attention_v2": ("n h d",),
    "ragged_page_attention_v3": ("n h d", "kv_cache"),
    "chunked_prefill_paged_decode": ("n h d", "key_cache", "value_cache"),
    "paged_cache_update": ("key_cache", "value_cache"),
    "multi_latent_ragged_page_attention": ("n h d", "kv_cache"),
    "multi_latent_ragged_page_attention_v2": ("n h d", "kv_cache"),
}
"""Named axes of what the functions return, or the argument that has them."""


def splits(call: PublicCall) -> Iterator[tuple[str, ...]]:
    """Named axes that a user may split: nothing, heads, and sequences where each has a cache of its own."""
    every = {axis for axes in call.axes.values() for axis in axes.split()}
    yield ()
    if "h" in every:
        yield HEADS
    if "b" in every:
        yield ("b",)


def spec(axes: str, split: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*("split" if axis in split else None for axis in axes.split()))


def run(call: PublicCall, split: tuple[str, ...], way: str) -> Any:
    """Outputs and gradients of the floating inputs."""
    kind = AxisType.Explicit if way == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((1, 2), ("other", "split"), axis_types=(kind,) * 2)
    arrays, specs = call.in_dtype("float32"), {name: spec(axes, split) for name, axes in call.axes.items()}
    if way in ("Explicit", "Auto"):
        placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
        with jax.set_mesh(mesh):
            return jax.jit(functools.partial(results, call))(placed)
    found = tuple(spec(call.axes.get(axes, axes), split) for axes in RESULTS[call.name])
    out_specs = found if len(found) > 1 else found[0]
    options = {"mesh": mesh, "in_specs": (specs,), "out_specs": out_specs, "check_vma": way == "shard_map"}
    mapped = _Mapped(call.floating, jax.shard_map(call.run, **options))
    return jax.jit(lambda arrays: results(mapped, arrays))(arrays)


class _Mapped(NamedTuple):
    """A call inside `jax.shard_map`, which is differentiated from without."""

    floating: list[str]
    run: Callable[..., Any]


def main(way: str, names: list[str]) -> None:
    for name in names or SERVING:
        call = SERVING[name]
        wanted = expected(name, "float32")
        for split in splits(call):
            print(f"{name} split by {split}", flush=True)
            check(run(call, split, way), wanted)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

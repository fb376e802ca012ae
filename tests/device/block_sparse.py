"""Block-sparse attention in Triton on a real GPU: numbers of every config, then times beside XLA and dense attention.

    python tests/device/block_sparse.py --out results

As `sparse.py`, with its options: outputs and gradients against the reference in float64 or, at real sizes, XLA in float32; device
times, XLA's, and those of `flash_attention` in Triton: under the same mask where it has one (documents, windows), else over all
pairs ("dense": what skipping has to beat). Writes `block_sparse.json`. `--skip` of xla,flash.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from delta_rule import Report
from sparse import run, target, times_of

from ejkernel.operations.block_sparse_attention import reference
from ejkernel.operations.block_sparse_attention.interface import (
    OPERATION,
    BlockSparseAttentionOutputs,
    as_flash_attention,
)
from ejkernel_triton.block_sparse_attention import config, kernel
from ejkernel_triton.flash_attention import config as flash_config, kernel as flash
from ejkernel_xla.block_sparse_attention import config as xla_config, kernel as xla


class Shape(NamedTuple):
    """mask: "documents" (causal), "window" (causal), "sinks" (window and first keys, a rule), or "blocks": random lists, with
    per_head of each head."""

    length: int
    heads: int
    key_heads: int
    mask: str
    size: int = 128
    block: int = 128
    listed: int = 8
    batch: int = 1
    dtype: str = "bfloat16"
    causal: bool = False
    per_head: bool = False


PROBLEMS = {
    "numbers-t512-blocks": Shape(512, 4, 2, "blocks", listed=2),
    "numbers-t500-blocks64-causal": Shape(500, 4, 2, "blocks", 64, 64, 4, batch=2, causal=True),
    "numbers-t400-blocks48": Shape(400, 4, 1, "blocks", 96, 48, 3, dtype="float16"),
    "numbers-t300-blocks24": Shape(300, 4, 1, "blocks", 64, 24, 3),
    "numbers-t500-heads64": Shape(500, 8, 2, "blocks", 64, 64, 3, batch=2, causal=True, per_head=True),
    "numbers-t400-documents": Shape(400, 4, 2, "documents"),
    "numbers-t400-sinks": Shape(400, 4, 2, "sinks", 64),
    "t8192-h32-k8-blocks": Shape(8192, 32, 8, "blocks"),
    "t8192-h32-k8-heads": Shape(8192, 32, 8, "blocks", per_head=True),
    "t8192-h32-k8-documents": Shape(8192, 32, 8, "documents"),
    "t32768-h32-k8-blocks": Shape(32768, 32, 8, "blocks", listed=32),
    "t32768-h32-k8-window": Shape(32768, 32, 8, "window"),
    "t8192-h32-k8-sinks": Shape(8192, 32, 8, "sinks"),
    "t32768-h32-k8-documents": Shape(32768, 32, 8, "documents"),
    "b4-t4096-h32-k8-blocks64": Shape(4096, 32, 8, "blocks", block=64, listed=16, batch=4),
}
SMALL = {
    "numbers-t96-blocks": Shape(96, 2, 1, "blocks", 16, 32, 2),
    "numbers-t96-heads": Shape(96, 4, 2, "blocks", 16, 32, 2, per_head=True),
    "t64-documents": Shape(64, 2, 1, "documents", 16),
}


def window_and_sinks(query: Any, key: Any) -> Any:
    return (key <= query) & ((key > query - 1024) | (key < 64))


def _said(shape: Shape) -> dict[str, Any]:
    """Masks and lists."""
    if shape.mask == "documents":
        segments = jnp.asarray(np.arange(shape.length) * 16 // shape.length, jnp.int32)[None]
        return {"query_segments": segments, "key_segments": segments, "causal": True}
    if shape.mask == "window":
        return {"sliding_window": (1023, 0), "causal": True}
    if shape.mask == "sinks":
        return {"mask_builder": window_and_sinks}
    blocks = -(-shape.length // shape.block)
    rng, rows = np.random.default_rng(0), []
    lists = (shape.batch, *((shape.heads,) if shape.per_head else ()))
    for own in np.tile(np.arange(blocks), math.prod(lists)):
        most = own + 1 if shape.causal else blocks
        chosen = np.sort(rng.permutation(most)[: shape.listed])
        rows.append(np.pad(chosen, (0, shape.listed - len(chosen)), constant_values=-1))
    tiles = np.array(rows, np.int32).reshape(*lists, blocks, shape.listed)
    full = tiles < np.arange(blocks)[:, None] if shape.causal else np.ones_like(tiles, bool)
    sizes = {"q_blocksize": shape.block, "kv_blocksize": shape.block, "causal": shape.causal}
    return {"key_tiles": jnp.asarray(tiles), "full_tiles": jnp.asarray(full), **sizes}


class Problem:
    """A shape with its arrays, and what is right."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.shape = name, shape
        keys = iter(jax.random.split(jax.random.key(0), 4))

        def normal(heads: int) -> Any:
            sizes = shape.batch, shape.length, heads, shape.size
            return jax.random.normal(next(keys), sizes, jnp.float32).astype(shape.dtype)

        made = {"query": normal(shape.heads), "key": normal(shape.key_heads), "value": normal(shape.key_heads)}
        bound = OPERATION.canonicalise(**made, **_said(shape))
        self.call, self.inputs = dataclasses.replace(bound.call, save_residuals=True), bound.inputs
        self.d_out = normal(shape.heads)
        self.outputs: Any = None
        self.space = {"forward": config.FORWARD, "backward": config.BACKWARD}

    @property
    def values(self) -> tuple[Any, Any, Any]:
        """Inputs, outputs as exact as they are known, cotangent."""
        return self.inputs, self.outputs, self.d_out

    def keep(self, exact: dict[str, Any]) -> None:
        """What forward gives is given to backward."""
        self.outputs = BlockSparseAttentionOutputs(exact["out"].astype(self.call.query.dtype), exact["lse"])

    def function(self, phase: str, module: Any, cfg: Any) -> Any:
        """Of `values`: a dict of arrays."""

        def run(inputs: Any, outputs: Any, d_out: Any) -> dict[str, Any]:
            if phase == "forward":
                found = module.forward(self.call, inputs, cfg)
            else:
                found = module.backward(self.call, inputs, outputs, BlockSparseAttentionOutputs(d_out), cfg)
            return {key: value for key, value in found._asdict().items() if value is not None}

        return jax.jit(run)

    def program(self, phase: str, cfg: Any) -> Any:
        """Compiled: a config of ours, or None for XLA."""
        shapes = self.inputs, OPERATION.output_specs(self.call), self.d_out
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        if cfg is not None:
            return self.function(phase, kernel, cfg).lower(*shapes).compile()
        return self.function(phase, xla, xla_config.heuristic(self.call, target())).lower(*shapes).compile()

    def exact(self, phase: str) -> dict[str, Any]:
        """From the same numbers: the reference in float64 for small problems, XLA in float32 for large ones."""
        if self.name.startswith("numbers") or "--small" in sys.argv:
            inputs = type(self.inputs)(*(None if x is None else _wide(x) for x in self.inputs))
            found: Any = reference.forward(self.call, inputs)
            if phase == "backward":
                found = reference.backward(self.call, inputs, found, BlockSparseAttentionOutputs(_wide(self.d_out)))
            return {key: jnp.asarray(x, jnp.float32) for key, x in found._asdict().items() if x is not None}
        specs = {name: dataclasses.replace(getattr(self.call, name), dtype="float32") for name in ("query", "key", "value")}
        other = object.__new__(Problem)
        other.call = dataclasses.replace(self.call, **specs)
        program = other.function(phase, xla, xla_config.heuristic(other.call, target()))
        return program(*jax.tree.map(lambda x: x.astype(jnp.float32) if _floating(x) else x, self.values))


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _wide(x: Any) -> Any:
    return np.asarray(x.astype(jnp.float32), np.float64) if _floating(x) else np.asarray(x)


def run_peers(report: Report, problem: Problem, options: argparse.Namespace) -> None:
    """Dense attention in Triton."""
    if "flash" in options.skip or problem.name.startswith("numbers") or report.remaining() < 0:
        return
    call, inputs = as_flash_attention(problem.call, problem.inputs)
    name = "flash" if problem.shape.mask in ("documents", "window") else "dense"
    try:
        cfg = flash_config.forward_heuristic(call, target())
        forward = jax.jit(lambda inputs, outputs, d_out: flash.forward(call, inputs, cfg))
        report.peer(problem.name, name, "forward", times_of(forward, (inputs, problem.outputs, problem.d_out), 7))
        other = flash_config.backward_heuristic(call, target())

        def backward(inputs: Any, outputs: Any, d_out: Any) -> Any:
            return flash.backward(call, inputs, outputs, outputs._replace(out=d_out, lse=None), other)[:3]

        report.peer(problem.name, name, "backward", times_of(jax.jit(backward), (inputs, problem.outputs, problem.d_out), 7))
    except Exception as error:  # noqa: BLE001 - a peer that does not run is a finding
        print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    sys.exit(run("block_sparse", __doc__, Problem, PROBLEMS, SMALL, run_peers))

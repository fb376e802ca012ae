"""`moe_route`, `moe_permute`, `moe_unpermute` in Triton on a GPU: numbers of every config, then times beside XLA and plain JAX.

    python tests/device/moe.py --out results

As `sparse.py`, with its options: outputs and gradients against the reference in float64 or, at real sizes, XLA in float32; device
times, XLA's, and those of plain JAX: top-k, argsort, take, and a sum over k or by segments. Writes `moe.json`. `--skip` of
xla,plain.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from delta_rule import Report
from sparse import run, times_of

from ejkernel.operations import get_operation, operation_module
from ejkernel.operations.moe_permute.cases import choices


class Shape(NamedTuple):
    """width: of rows; 0 for the router, whose logits are float32 whatever dtype says: that stands for its tolerance, as a near tie
    may be decided either way. groups: 8 with sigmoid and a bias, as in DeepSeek-V3; 0 = softmax."""

    part: str
    tokens: int
    experts: int
    k: int
    width: int = 0
    groups: int = 0
    dropped: float = 0.0
    dtype: str = "bfloat16"


PROBLEMS = {
    "numbers-route-t1000-e64-k8": Shape("route", 1000, 64, 8),
    "numbers-route-t1000-e160-k6-v3": Shape("route", 1000, 160, 6, groups=8),
    "numbers-permute-t1000-d130-e12-k4": Shape("permute", 1000, 12, 4, 130, dropped=0.2),
    "numbers-permute-t77-d2048-e256-k8-float32": Shape("permute", 77, 256, 8, 2048, dtype="float32"),
    "numbers-unpermute-t1000-d130-k4": Shape("unpermute", 1000, 12, 4, 130, dropped=0.2),
    "numbers-unpermute-t77-d2048-k8-float16": Shape("unpermute", 77, 256, 8, 2048, dtype="float16"),
    **{
        f"{part}-t{tokens}-d{width}-e{experts}-k{k}": Shape(part, tokens, experts, k, width)
        for part in ("permute", "unpermute")
        for tokens, width, experts, k in ((16384, 2048, 64, 8), (8192, 4096, 8, 2), (64, 2048, 64, 8))
    },
    "route-t16384-e64-k8": Shape("route", 16384, 64, 8),
    "route-t16384-e256-k8-v3": Shape("route", 16384, 256, 8, groups=8),
    "route-t8192-e8-k2": Shape("route", 8192, 8, 2),
    "route-t64-e64-k8": Shape("route", 64, 64, 8),
}
SMALL = {
    "numbers-route-t9-e32-k4-v3": Shape("route", 9, 32, 4, groups=8),
    "route-t9-e8-k2": Shape("route", 9, 8, 2),
    "permute-t20-d24-e8-k2": Shape("permute", 20, 8, 2, 24, dropped=0.3),
    "unpermute-t20-d24-e8-k2": Shape("unpermute", 20, 8, 2, 24),
}


def arguments_of(shape: Shape, keys: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and options of `canonicalise`."""
    if shape.part == "route":
        logits = 2 * jax.random.normal(next(keys), (shape.tokens, shape.experts))
        if not shape.groups:
            return {"logits": logits}, {"k": shape.k}
        bias = 0.1 * jax.random.normal(next(keys), (shape.experts,))
        options = {"k": shape.k, "scoring": "sigmoid", "num_groups": shape.groups, "top_groups": 4, "scale": 2.5}
        return {"logits": logits, "bias": bias}, options
    found = choices(np.random.default_rng(0), shape.tokens, shape.k, shape.experts, dropped=shape.dropped)
    if shape.part == "permute":
        x = jax.random.normal(next(keys), (shape.tokens, shape.width), shape.dtype)
        return {"x": x, "experts": jnp.asarray(found)}, {"num_experts": shape.experts}
    order = np.argsort(np.where(found < 0, shape.experts, found).reshape(-1), kind="stable")
    row = np.empty_like(order)
    row[order] = np.arange(order.size)
    positions = np.where(found < 0, ~row.reshape(found.shape), row.reshape(found.shape)).astype(np.int32)
    rows = jax.random.normal(next(keys), (found.size, shape.width), shape.dtype)
    weights = jax.nn.softmax(jax.random.normal(next(keys), found.shape))
    return {"rows": rows, "positions": jnp.asarray(positions), "weights": weights}, {}


class Problem:
    """A shape with its arrays, and what is right."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.shape, self.operation = name, shape, f"moe_{shape.part}"
        self.owner = get_operation(self.operation)
        keys = iter(jax.random.split(jax.random.key(0), 6))
        arrays, options = arguments_of(shape, keys)
        bound = self.owner.canonicalise(**arrays, **options)
        self.call, self.inputs = dataclasses.replace(bound.call, save_residuals=True), bound.inputs
        specs = self.owner.output_specs(self.call)
        drawn = (jax.random.normal(next(keys), spec.shape, spec.dtype) if "float" in spec.dtype else None for spec in specs)
        self.cotangents = self.owner.Outputs(*drawn)
        self.outputs: Any = None
        config = self.module("triton", "config")
        self.space = {"forward": config.FORWARD, "backward": config.BACKWARD}

    def module(self, platform: str, part: str) -> Any:
        return importlib.import_module(f"ejkernel_{platform}.{self.operation}.{part}")

    @property
    def values(self) -> tuple[Any, Any, Any]:
        """Inputs, outputs as exact as they are known, cotangents."""
        return self.inputs, self.outputs, self.cotangents

    def keep(self, exact: dict[str, Any]) -> None:
        """What forward gives is given to backward."""
        specs = self.owner.output_specs(self.call)._asdict()
        self.outputs = self.owner.Outputs(**{name: jnp.asarray(exact[name], spec.dtype) for name, spec in specs.items()})

    def function(self, phase: str, module: Any, cfg: Any) -> Any:
        """Of `values`: a dict of arrays."""

        def run(inputs: Any, outputs: Any, cotangents: Any) -> dict[str, Any]:
            if phase == "forward":
                found = module.forward(self.call, inputs, cfg)
            else:
                found = module.backward(self.call, inputs, outputs, cotangents, cfg)
            return {key: value for key, value in found._asdict().items() if value is not None}

        return jax.jit(run)

    def program(self, phase: str, cfg: Any) -> Any:
        """Compiled: a config of ours, or None for XLA."""
        values = self.inputs, self.owner.output_specs(self.call), self.cotangents
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values)
        module = self.module("xla" if cfg is None else "triton", "kernel")
        return self.function(phase, module, cfg).lower(*shapes).compile()

    def exact(self, phase: str) -> dict[str, Any]:
        """From the same numbers: the reference in float64 for small problems, XLA in float32 for large ones."""
        if self.name.startswith("numbers") or "--small" in sys.argv:
            reference = operation_module(self.operation, "reference")
            inputs, cotangents = _wide(self.inputs), _wide(self.cotangents)
            found = reference.forward(self.call, inputs)
            if phase == "backward":
                found = reference.backward(self.call, inputs, found, cotangents)
            return {key: jnp.asarray(x, jnp.float32) for key, x in found._asdict().items() if x is not None}
        run = self.function(phase, self.module("xla", "kernel"), None)
        return run(*jax.tree.map(lambda x: x.astype(jnp.float32) if _floating(x) else x, self.values))


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _wide(record: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32), np.float64) if _floating(x) else np.asarray(x), record)


def plain(problem: Problem) -> dict[str, Any]:
    """What one writes in jax.numpy, of the differentiable inputs, by name."""
    call, inputs, shape = problem.call, problem.inputs, problem.shape

    def route(logits: Any) -> Any:
        if not shape.groups:
            weights, experts = jax.lax.top_k(jax.nn.softmax(logits[0], axis=-1), shape.k)
            return weights / weights.sum(axis=-1, keepdims=True), experts
        scores = jax.nn.sigmoid(logits[0])
        ranked = scores + inputs.bias
        groups = jax.lax.top_k(ranked.reshape(shape.tokens, shape.groups, -1), 2)[0].sum(axis=-1)
        admitted = jax.nn.one_hot(jax.lax.top_k(groups, call.top_groups)[1], shape.groups).sum(axis=1) > 0
        ranked = jnp.where(jnp.repeat(admitted, shape.experts // shape.groups, axis=1), ranked, -jnp.inf)
        experts = jax.lax.top_k(ranked, shape.k)[1]
        weights = jnp.take_along_axis(scores, experts, axis=1)
        return call.scale * weights / weights.sum(axis=-1, keepdims=True), experts

    def permute(x: Any) -> Any:
        flat = inputs.experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        return x[0][order // shape.k], jnp.bincount(flat, length=shape.experts), jnp.argsort(order)

    def unpermute(rows: Any, weights: Any) -> Any:
        parts = rows[0][inputs.positions[0]].astype(jnp.float32) * weights[0, :, :, None]
        return (jnp.sum(parts, axis=1).astype(rows.dtype),)

    def by_segments(rows: Any, weights: Any) -> Any:
        order = jnp.argsort(inputs.positions.reshape(-1))
        parts = rows[0].astype(jnp.float32) * weights.reshape(-1)[order][:, None]
        return (jax.ops.segment_sum(parts, order // shape.k, shape.tokens).astype(rows.dtype),)

    return {
        "route": {"plain": route},
        "permute": {"plain": permute},
        "unpermute": {"plain": unpermute, "segment_sum": by_segments},
    }[shape.part]


def run_peers(report: Report, problem: Problem, options: argparse.Namespace) -> None:
    if "plain" in options.skip or problem.name.startswith("numbers") or problem.shape.dropped or report.remaining() < 0:
        return
    moving = tuple(getattr(problem.inputs, name) for name in problem.owner.differentiable)
    cotangent = next(value for value in problem.cotangents if value is not None)[0]
    for name, function in plain(problem).items():
        try:
            report.peer(problem.name, name, "forward", times_of(jax.jit(function), moving, 5))
            backward = jax.jit(
                lambda moving, cotangent, function=function: jax.vjp(lambda *m: function(*m)[0], *moving)[1](cotangent)
            )
            report.peer(problem.name, name, "backward", times_of(backward, (moving, cotangent), 5))
        except Exception as error:  # noqa: BLE001 - a peer that does not run is a finding
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    sys.exit(run("moe", __doc__, Problem, PROBLEMS, SMALL, run_peers))

"""Calls of the operations over rows for `rows.py`: shapes, arrays, what is exact, and what a user would write."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations import operation_module
from ejkernel.plugin import current_target
from ejkernel_xla._vocabulary import VocabularyConfig

NARROW = (1, 2, 7, 8, 33, 64, 100, 128, 200, 256, 513, 1000)
WIDTHS = (*NARROW, 1024, 3000, 4096, 4099, 8192, 12288, 16384, 20000, 32768, 40000, 65536, 128256, 131072)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: an operation, shapes of its arrays by name, and options."""

    operation: str
    shapes: dict[str, tuple[int, ...]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    float32: tuple[str, ...] = ()
    """Arrays that are float32 whatever the others are."""

    @property
    def name(self) -> str:
        return f"{self.operation} " + "x".join(map(str, next(iter(self.shapes.values()))))

    def arrays(self, seed: int, dtype: str = "bfloat16") -> dict[str, Any]:
        def make(key, name, shape):
            if name == "cu_seqlens":
                bounds = jnp.asarray([0, 40000, 50000, 50256, 65536][: shape[0]], jnp.int32)
                return bounds // max(65536 // self.shapes["x"][1], 1)
            if name == "targets":
                return jax.random.randint(key, shape, 0, self.shapes["x"][-1])
            if name == "where":
                return jax.random.bernoulli(key, 0.6, shape)
            return jax.random.normal(key, shape, jnp.float32 if name in self.float32 else dtype)

        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        return {name: make(key, name, shape) for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)}


def norm(operation: str, rows: int, width: int) -> Problem:
    return Problem(operation, {"x": (rows, width), "scale": (width,), "offset": (width,)})


def rotary(layout: str, batch: int, length: int, query: int, key: int, width: int, **options: Any) -> Problem:
    def heads(count: int) -> tuple[int, ...]:
        return (batch, count, length, width) if layout == "BHTD" else (batch, length, count, width)

    shapes = {"query": heads(query), "key": heads(key), "cos": (length, width // 2), "sin": (length, width // 2)}
    return Problem("rope", shapes, {"layout": layout, **options}, ("cos", "sin"))


def added(rows: int, width: int) -> Problem:
    return Problem("add_rms_norm", {"x": (rows, width), "residual": (rows, width), "scale": (width,)})


def norm_rotary(
    layout: str, batch: int, length: int, query: int, key: int, width: int, rotary_dim: int, **options: Any
) -> Problem:
    turned = rotary(layout, batch, length, query, key, width)
    shapes = {name: (length, rotary_dim // 2) if name in ("cos", "sin") else shape for name, shape in turned.shapes.items()}
    scales = {"query_scale": (width,), "key_scale": (width,)}
    return Problem(
        "qk_norm_rope", {**shapes, **scales}, {"layout": layout, "rotary_dim": rotary_dim, **options}, ("cos", "sin")
    )


def convolution(batch: int, length: int, channels: int, **more: tuple[int, ...]) -> Problem:
    shapes = {"x": (batch, length, channels), "weight": (channels, 4), "bias": (channels,), **more}
    return Problem("causal_conv1d", shapes, {"activation": "silu"})


TIMED = (
    norm("layer_norm", 16384, 4096),
    norm("layer_norm", 131072, 128),
    norm("layer_norm", 1048576, 128),
    norm("layer_norm", 1048576, 64),
    norm("layer_norm", 262144, 512),
    norm("layer_norm", 65536, 1024),
    norm("layer_norm", 8192, 8192),
    norm("layer_norm", 8192, 16384),
    norm("layer_norm", 2048, 32768),
    norm("layer_norm", 2048, 65536),
    norm("layer_norm", 1024, 131072),
    Problem("softmax", {"x": (32768, 4096)}),
    Problem("softmax", {"x": (131072, 128)}),
    Problem("softmax", {"x": (1048576, 128)}),
    Problem("softmax", {"x": (8192, 16384)}),
    Problem("softmax", {"x": (2048, 32768)}),
    Problem("softmax", {"x": (2048, 65536)}),
    Problem("softmax", {"x": (1024, 128256)}),
    Problem("softmax", {"x": (1024, 131072)}),
    norm("rms_norm", 16384, 4096),
    norm("rms_norm", 131072, 128),
    norm("rms_norm", 1048576, 128),
    norm("rms_norm", 8192, 16384),
    norm("rms_norm", 2048, 32768),
    norm("rms_norm", 2048, 65536),
    norm("rms_norm", 1024, 131072),
    added(16384, 4096),
    added(131072, 128),
    added(1048576, 128),
    added(1024, 131072),
    rotary("BTHD", 4, 8192, 32, 8, 128),
    rotary("BHTD", 4, 8192, 32, 8, 128),
    norm_rotary("BTHD", 4, 8192, 32, 8, 128, 128),
    Problem("mean_pooling", {"x": (8, 8192, 32, 128)}),
    Problem("mean_pooling", {"x": (1, 65536, 32, 128), "cu_seqlens": (5,)}),
    convolution(2, 4096, 4096),
    convolution(1, 8192, 8192, cu_seqlens=(5,)),
    Problem("cross_entropy", {"x": (8192, 128256), "targets": (8192,)}),
    Problem("cross_entropy", {"x": (16384, 32000), "targets": (16384,)}),
)


def checked_problems(operation: str) -> list[Problem]:
    """Small problems over many widths and flags."""
    if operation in ("layer_norm", "rms_norm"):
        return [norm(operation, rows, width) for rows, widths in ((13, WIDTHS), (73, NARROW)) for width in widths] + [
            Problem(operation, {"x": (37, 640)}), Problem(operation, {"x": (70001, 128), "scale": (128,)}),
            Problem(operation, {"x": (3, 5, 512), "scale": (512,)}, {"scale_offset": 1.0}),
        ]  # fmt: skip
    if operation == "softmax":
        shapes = [(rows, width) for rows, widths in ((13, WIDTHS), (73, NARROW)) for width in widths]
        return [Problem("softmax", {"x": shape}, {"scale": 0.7}) for shape in shapes] + [
            Problem("softmax", {"x": (4, 3, 9, width), "where": where})
            for width in (100, 4096, 40000)
            for where in ((4, 3, 9, width), (4, 1, 9, width), (9, 1), (4, 1, 1, 1), (1, 3, 1, width))
        ]
    if operation == "rope":
        rope = functools.partial(rotary, batch=3, length=77, query=6, key=2)
        return [
            rope(layout, width=width, interleaved=interleaved)
            for layout in ("BTHD", "BHTD")
            for width in (2, 26, 64, 128, 256)
            for interleaved in (False, True)
        ]
    if operation != "mean_pooling":
        return []  # the conformance suite's cases are many
    dense = [(3, length, 5, width) for length in (1, 255, 256, 257, 5000) for width in (7, 128)]
    return [Problem("mean_pooling", {"x": shape}) for shape in dense] + [
        Problem("mean_pooling", {"x": (1, 65600, 2, 16), "cu_seqlens": (count,)}) for count in (1, 2, 5)
    ]


class Prepared:
    """A problem with its canonical call, inputs on the device, cotangents, and what XLA makes of them in float32."""

    def __init__(self, problem: Problem, dtype: str, seed: int = 0, platform: str = "triton") -> None:
        self.problem = problem
        self.operation = operation_module(problem.operation, "interface").OPERATION
        self.kernel = importlib.import_module(f"ejkernel_{platform}.{problem.operation}.kernel")
        self.config = importlib.import_module(f"ejkernel_{platform}.{problem.operation}.config")
        self.reference = operation_module(problem.operation, "reference")
        self.xla = importlib.import_module(f"ejkernel_xla.{problem.operation}.kernel")
        self.xla_config = VocabularyConfig(1, 1) if problem.operation == "cross_entropy" else None  # logits have no tiles
        bound = self.operation.canonicalise(**problem.arrays(seed, dtype), **problem.options)
        self.call = dataclasses.replace(bound.call, save_residuals=True)
        self.light = bound.call
        self.inputs = bound.inputs
        public = self.operation.public(self.call)
        specs = self.operation.output_specs(self.call)._asdict()
        keys = jax.random.split(jax.random.key(seed + 1), len(public))
        self.cotangents = self.operation.Outputs(**{
            name: jax.random.normal(key, specs[name].shape, specs[name].dtype) for key, name in zip(keys, public, strict=True)
        })  # fmt: skip
        self.public = public
        self.floors: dict[str, float] = {}

    def outputs(self) -> Any:
        return jax.jit(lambda inputs: self.xla.forward(self.call, inputs, self.xla_config))(self.inputs)

    def exact(self) -> dict[str, np.ndarray]:
        """Results and gradients in float64 on the host; `floors` gets the magnitude that d_x is a difference of."""
        wide = [jax.tree.map(_wide, values) for values in (self.inputs, self.cotangents)]
        outputs = self.reference.forward(self.call, wide[0])
        gradients = self.reference.backward(self.call, wide[0], outputs, wide[1])
        if "rstd" in outputs._fields:
            weight = 1.0 if wide[0].scale is None else wide[0].scale[0] + self.call.scale_offset
            self.floors["d_x"] = float(np.linalg.norm(wide[1].out * weight * outputs.rstd[..., None]))
        return self.named(outputs, gradients)

    def named(self, outputs: Any, gradients: Any) -> dict[str, Any]:
        found = {name: getattr(outputs, name) for name in self.public}
        return found | {f"d_{key}": value for key, value in gradients._asdict().items() if value is not None}

    def ours(self, forward: Any = None, backward: Any = None) -> dict[str, Any]:
        """Results and gradients of the kernels."""
        target = current_target()
        forward = forward or self.config.FORWARD.heuristic(self.call, target)
        backward = backward or self.config.BACKWARD.heuristic(self.call, target)

        @jax.jit
        def run(inputs, cotangents):
            outputs = self.kernel.forward(self.call, inputs, forward)
            return outputs, self.kernel.backward(self.call, inputs, outputs, cotangents, backward)

        return self.named(*run(self.inputs, self.cotangents))


def _wide(value: Any) -> np.ndarray:
    value = np.asarray(value)
    return value if value.dtype in (np.bool_, np.int32) else value.astype(np.float64)


def moved_bytes(prepared: Prepared, phase: str) -> int:
    """What has to pass memory; the gradients of cos and sin are not asked for."""
    asked = "forward" if prepared.operation.name == "rope" else phase
    return prepared.operation.cost(prepared.light, asked).bytes


def textbook(prepared: Prepared, phase: str) -> Callable[..., Any]:
    """What a user would write, differentiated by JAX."""
    call = prepared.call

    def norm_of(x, scale, offset=None):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, -1, keepdims=True) if call_name == "layer_norm" else 0.0
        rstd = jax.lax.rsqrt(jnp.mean((wide - mean) ** 2, -1, keepdims=True) + call.epsilon)
        normalised = (wide - mean) * rstd * scale[0]
        return (normalised if offset is None else normalised + offset[0]).astype(x.dtype)

    def added_of(x, residual, scale):
        return norm_of(x + residual, scale), x + residual

    def softmax_of(x):
        return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)

    def rope_of(query, key, cos, sin):
        def rotate(x):
            first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
            c, s = (jnp.expand_dims(value, 1 if call.heads_first else 2) for value in (cos, sin))
            return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(x.dtype)

        return rotate(query), rotate(key)

    def pooling_of(x, cu_seqlens=None):
        if cu_seqlens is None:
            return jnp.mean(x.astype(jnp.float32), axis=1, keepdims=True).astype(x.dtype)
        ids = jnp.searchsorted(cu_seqlens[0], jnp.arange(x.shape[1]), side="right") - 1
        total = jax.ops.segment_sum(x[0].astype(jnp.float32), ids, cu_seqlens.shape[1] - 1, indices_are_sorted=True)
        return (total / jnp.diff(cu_seqlens[0])[:, None, None]).astype(x.dtype)[None]

    def norm_rope_of(query, key, cos, sin, query_scale, key_scale):
        return rope_of(norm_of(query, query_scale), norm_of(key, key_scale), cos, sin)

    def convolution_of(x, weight, bias, cu_seqlens=None):
        before = call.width - 1
        padded, out = jnp.pad(x, ((0, 0), (before, 0), (0, 0))).astype(jnp.float32), bias[:, None].astype(jnp.float32)
        tokens = jnp.arange(x.shape[1])
        start = 0 if cu_seqlens is None else cu_seqlens[0][jnp.searchsorted(cu_seqlens[0], tokens, side="right") - 1]
        for back in range(call.width):
            seen = (tokens - back >= start)[None, :, None]
            out = out + jnp.where(seen, padded[:, before - back :][:, : x.shape[1]], 0) * weight[:, None, :, before - back]
        return jax.nn.silu(out).astype(x.dtype)

    def cross_entropy_of(x, targets):
        logits = x.astype(jnp.float32)
        lse = jax.nn.logsumexp(logits, axis=-1)
        return lse - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0], lse

    call_name = prepared.operation.name
    functions = {
        "softmax": softmax_of, "add_rms_norm": added_of, "rope": rope_of, "qk_norm_rope": norm_rope_of,
        "mean_pooling": pooling_of, "causal_conv1d": convolution_of, "cross_entropy": cross_entropy_of,
    }  # fmt: skip
    function = functions.get(call_name, norm_of)
    fixed = {"rope": (2, 3), "qk_norm_rope": (2, 3), "mean_pooling": (1,), "cross_entropy": (1,), "causal_conv1d": (3,)}.get(
        call_name, ()
    )

    def run(inputs, outputs, cotangents):
        given = [value for value in inputs if value is not None]
        if phase == "forward":
            return jax.tree.leaves(function(*given))
        moving = [index for index in range(len(given)) if index not in fixed]

        def of_moving(*values):
            return function(*(values[moving.index(index)] if index in moving else one for index, one in enumerate(given)))

        _, pull = jax.vjp(of_moving, *(given[index] for index in moving))
        grads = [getattr(cotangents, name) for name in prepared.public]
        return list(pull(tuple(grads) if len(grads) > 1 else grads[0]))

    return run

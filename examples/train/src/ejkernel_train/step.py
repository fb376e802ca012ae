"""The training step: AdamW or Muon on float32 parameters, products in a narrower dtype, buffers donated."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from ejkernel.optimizers import muon
from ejkernel_train.config import TrainConfig
from ejkernel_train.data import IGNORED, Packed
from ejkernel_train.float8 import next_scales
from ejkernel_train.model import Model
from ejkernel_train.operations import choose
from ejkernel_train.sharding import BATCH, Layout, spec_of


class State(NamedTuple):
    """All that a step changes, and all that a checkpoint holds."""

    model: Model
    moments: Any
    step: jax.Array


def optimizer(config: TrainConfig) -> Any:  # optax.GradientTransformation, whose types know arrays alone
    """Clipped AdamW, or Muon with updates of its size for the matrices of blocks; the rate rises, then falls along a cosine to a
    tenth. The embedding and vectors are not decayed."""
    last = max(config.steps, config.warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(0, config.learning_rate, config.warmup, last, 0.1 * config.learning_rate)

    def rate(count: Any) -> Any:
        return schedule(count + 1)

    if config.optimizer == "muon":
        own = muon(rate, weight_decay=config.weight_decay, adam_b2=0.95, consistent_rms=0.2, matrices=orthogonalized)
    else:
        own = optax.adamw(rate, b2=0.95, weight_decay=config.weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(config.clip), own)


def orthogonalized(weights: Model) -> Any:
    """True at the matrices of blocks, of which filters of convolutions are none."""

    def multiplies(path: Any, chosen: bool) -> bool:
        return chosen and not jax.tree_util.keystr(path).endswith(".filters")

    return jax.tree_util.tree_map_with_path(multiplies, decayed(weights))


def decayed(weights: Model) -> Any:
    """True at the matrices of blocks, of which biases of experts are none."""

    def is_decayed(path: Any, leaf: jax.Array) -> bool:
        return weights.is_matrix(leaf) and not jax.tree_util.keystr(path).endswith("_bias")

    nowhere = jax.tree.map(lambda leaf: False, weights)
    return eqx.tree_at(lambda model: model.blocks, nowhere, jax.tree_util.tree_map_with_path(is_decayed, weights.blocks))


def split(model: Model) -> tuple[Model, Model]:
    """The weights, which the optimizer updates, and the scales of float8, which it does not; None at the places of the others."""
    is_scale = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path).endswith(".scales"), model)
    scales, weights = eqx.partition(model, is_scale)
    return weights, scales


def initialise(config: TrainConfig, shardings: State | None = None) -> State:
    """The state before the first step, on one device without `shardings`."""
    of_model, of_moments, of_step = shardings or (None, None, None)
    model = Model(config.sizes, jax.random.key(config.seed), stacked=config.layers == "scan", shardings=of_model)
    moments = jax.jit(optimizer(config).init, out_shardings=of_moments)(split(model)[0])
    return State(model, moments, jax.jit(partial(jnp.zeros, (), jnp.int32), out_shardings=of_step)())


class Measures(NamedTuple):
    """Scalars of a step: the loss before its update, and the norm of the gradient before clipping."""

    loss: jax.Array
    norm: jax.Array


def layout_of(config: TrainConfig) -> Layout:
    return dataclasses.replace(Layout.parse(config.mesh), typed=config.kernels != "peers")


def train_step(config: TrainConfig, state: State, window: jax.Array | Packed) -> tuple[State, Measures]:
    """One update on windows `[B, T + 1]` or packed rows `[B, T]`.

    With `on_nonfinite="skip"`, a step whose loss or gradient is not finite changes nothing but the number of the step.
    """
    operations, layout = choose(config.kernels, config.plain), layout_of(config)
    narrow = state.model.narrow_weights(operations, layout)

    def loss(model: Model, window: jax.Array | Packed, weight: jax.Array) -> jax.Array:
        return eqx.combine(model, narrow).loss(window, operations, config.dtype, layout, remat=config.remat, weight=weight)

    value, gradients, largest = accumulated(
        loss, state.model.compute_copy(config.dtype, layout.mesh is None), window, config.accumulate
    )
    weights, scales = split(state.model)
    updates, moments = optimizer(config).update(gradients, state.moments, weights)
    model = eqx.combine(eqx.apply_updates(weights, updates), jax.tree.map(next_scales, scales, largest))
    squares = (jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients))  # clipping has them too, so XLA shares them
    measures = Measures(value, jnp.sqrt(sum(squares, start=jnp.zeros(()))))
    if config.on_nonfinite == "skip":
        finite = jnp.isfinite(measures.loss) & jnp.isfinite(measures.norm)
        after, before = (model, moments), (state.model, state.moments)
        model, moments = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    return State(model, moments, state.step + 1), measures


def accumulated(
    loss: Callable[..., jax.Array], model: Model, window: jax.Array | Packed, parts: int
) -> tuple[jax.Array, Any, Any]:
    """The mean loss of all parts of the batch, its gradient for the weights, in float32, and for the scales of float8 the largest
    of all parts. Sequence i is in part `i % parts`, so that each device keeps its own. A part's loss is a mean over its labels,
    and weighs as much as it has of them."""

    def of_part(part: Any) -> tuple[jax.Array, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(model, *part)
        return value, *split(gradients)

    if parts == 1:
        value, gradients, largest = of_part((window, jnp.ones(())))
        return value, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients), largest

    def add(total: Any, part: Any) -> tuple[Any, None]:
        value, gradients, largest = of_part(part)
        both = jax.tree.map(jnp.add, total[:2], (value, gradients))
        return (*both, jax.tree.map(jnp.maximum, total[2], largest)), None

    cut = jax.tree.map(lambda rows: jnp.moveaxis(rows.reshape(-1, parts, rows.shape[1]), 1, 0), window)
    counts = jnp.sum(cut.labels != IGNORED, axis=(1, 2)) if isinstance(cut, Packed) else jnp.ones(parts)
    both = cut, parts * counts / jnp.maximum(jnp.sum(counts), 1)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.float32), jax.eval_shape(of_part, jax.tree.map(itemgetter(0), both))
    )
    (value, gradients, largest), _ = jax.lax.scan(add, zeros, both)
    return value / parts, jax.tree.map(lambda leaf: leaf / parts, gradients), largest


class Compiled(NamedTuple):
    """The step's program, how its arguments lie on devices, and the seconds that each stage took to make it."""

    program: jax.stages.Compiled
    shardings: Any
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float


class Lowered(NamedTuple):
    """The step before XLA compiles it.

    Attributes:
        tuned: the same step with fewer layers, which XLA compiles first, or None. See `tunes_alike`.
    """

    program: jax.stages.Lowered
    shardings: Any
    trace_seconds: float
    lower_seconds: float
    tuned: jax.stages.Lowered | None = None

    def compile(self) -> Compiled:
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            options: dict[str, str | bool] = {}
            if self.tuned is not None:
                if not jax.config.jax_compilation_cache_dir:  # where XLA would keep what it finds
                    options["xla_gpu_per_fusion_autotune_cache_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
                self.tuned.compile(options or None)
            program = self.program.compile(options or None)
        return Compiled(program, self.shardings, self.trace_seconds, self.lower_seconds, time.perf_counter() - start)


def check_mesh(config: TrainConfig) -> None:
    """Raises:
    ValueError: the mesh does not divide the experts, the batch or a parameter.
    """
    layout = Layout.parse(config.mesh)
    if layout.mesh is None:
        return
    devices = layout.mesh.shape
    if config.sizes.experts % layout.expert_devices:
        raise ValueError(
            f"--mesh has expert={layout.expert_devices}; make it a divisor of the model's {config.sizes.experts} experts"
        )
    if config.batch // config.accumulate % (parts := math.prod(devices[axis] for axis in BATCH)):
        cut = f", in {config.accumulate} parts" if config.accumulate > 1 else ""
        raise ValueError(
            f"--batch is {config.batch}{cut}; make it a multiple of the {parts} devices of {', '.join(BATCH)} in --mesh"
        )
    model = jax.eval_shape(lambda: initialise(config)).model
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path)
        for size, axis in zip(leaf.shape, spec_of(name, leaf.ndim), strict=False):  # axes after the spec's are whole
            if axis is not None and size % devices[axis]:
                raise ValueError(f"--mesh has {axis}={devices[axis]}; make it a divisor of {size}, an axis of {name}")


def compile_step(config: TrainConfig) -> Compiled:
    """Trace, lower and compile the step without running anything.

    Raises:
        ValueError: as `check_mesh`.
    """
    return lower_step(config).compile()


def lower_step(config: TrainConfig) -> Lowered:
    """Trace and lower the step.

    Raises:
        ValueError: as `check_mesh`.
    """
    check_mesh(config)
    lowered = _lower(config)
    return lowered._replace(tuned=_lower(dataclasses.replace(config, repeats=2)).program) if tunes_alike(config) else lowered


def tunes_alike(config: TrainConfig) -> bool:
    """Whether a step with two repeats is compiled before this one.

    On a GPU, XLA times kernels for every product of a program, one after the other, also where hundreds are equal: minutes for 24
    layers that each have their own. It reads what was found for an equal product of an earlier program.
    """
    return config.layers == "unroll" and config.sizes.repeats > 2 and jax.default_backend() == "gpu"


def batch_shape(config: TrainConfig) -> Any:
    """Of what `data.batch` makes."""
    window, row = (jax.ShapeDtypeStruct((config.batch, config.length + more), jnp.int32) for more in (1, 0))
    return Packed(row, row, row) if config.packed else window


def _lower(config: TrainConfig) -> Lowered:
    state, layout = jax.eval_shape(lambda: initialise(config)), Layout.parse(config.mesh)
    window = batch_shape(config)
    shardings, batch = layout.shardings(state), layout.batch()
    step = jax.jit(
        lambda state, window: train_step(config, state, window),
        donate_argnums=0,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, None),
    )
    clock = [time.perf_counter()]
    traced = step.trace(state, window)
    clock.append(time.perf_counter())
    lowered = traced.lower()
    clock.append(time.perf_counter())
    trace_seconds, lower_seconds = (after - before for before, after in itertools.pairwise(clock))
    return Lowered(lowered, (shardings, batch), trace_seconds, lower_seconds)

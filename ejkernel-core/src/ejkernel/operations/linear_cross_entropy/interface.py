"""Contract of `linear_cross_entropy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, has_gradient, named, statistics_dtype
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.operations.common import vocabulary as vocabulary
from ejkernel.operations.common.rows.interface import SHARDABLE_ROWS, row_dims
from ejkernel.operations.cross_entropy.interface import (
    OPERATION as PER_ROW,
    CrossEntropyCall,
    CrossEntropyInputs,
    CrossEntropyOutputs,
)
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape, finite_number


class LinearCrossEntropyInputs(NamedTuple):
    """x `[b, ..., d]`, hidden states; targets int32 `[b, ...]`; head `[1 or b, d, v]`, or `[1 or b, v, d]` with `transpose_head`;
    head_bias `[1 or b, v]`; weights `[b, ...]` in float32 (float64 beside float64), None for ones."""

    x: Float[Array, "*rows d"]
    targets: Int32[Array, "*rows"]
    head: Float[Array, "#b _ _"]
    head_bias: Float[Array, "#b v"] = None
    weights: Float[Array, "*rows"] = None


class LinearCrossEntropyOutputs(NamedTuple):
    """total, penalty `[b]` in float32 (float64 of float64), the latter only with a z-loss. Residuals: the gradients of total by
    x `[b, ..., d]`, by head `[b, d, v]` or `[b, v, d]`, and by its bias `[b, v]`, of every member of the batch also where members
    share the head."""

    total: Float[Array, " b"]
    penalty: Float[Array, " b"] = None
    d_x: Float[Array, "*rows d"] = None
    d_head: Float[Array, "b _ _"] = None
    d_head_bias: Float[Array, "b v"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCrossEntropyCall(Call):
    """Static facts.

    Attributes:
        transpose_head: head is `[b, v, d]`.
        logit_softcap: c in `c * tanh(logits / c)`; -inf stays -inf.
        label_smoothing: s in [0, 1].
        z_loss: weight of the square of lse, >= 0.
        precision: of the products: None (full precision of the common dtype), or "default", "high", "highest".
    """

    x: ArraySpec
    targets: ArraySpec
    head: ArraySpec
    head_bias: ArraySpec | None = None
    weights: ArraySpec | None = None
    transpose_head: bool = False
    logit_softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    precision: str | None = None

    @property
    def vocabulary(self) -> int:
        """v."""
        return vocabulary.vocabulary_of(self.x, self.head, self.transpose_head)

    @property
    def per_row(self) -> CrossEntropyCall:
        """The losses of the rows, of which total is the sum."""
        return CrossEntropyCall(
            x=self.x,
            targets=self.targets,
            head=self.head,
            head_bias=self.head_bias,
            transpose_head=self.transpose_head,
            logit_softcap=self.logit_softcap,
            sum_logits=self.label_smoothing > 0,
            precision=self.precision,
        )


class LinearCrossEntropy(Operation):
    """`total_b = sum_rows weight ((1 - s) (lse - l_target) + s (lse - mean_v l_v) + z_loss lse^2)` with `l = cap(x . head +
    head_bias)` and `lse = log sum_v exp(l_v)`; penalty is the part with z_loss, a constant under differentiation.

    Rows are those of `cross_entropy`: one whose target is -1 takes no part, whatever it holds; one whose target is outside of the
    vocabulary has none. In float32 inside; the logits of all rows are never there at once. weights are constants under
    differentiation.
    """

    name = "linear_cross_entropy"
    Call = LinearCrossEntropyCall
    Inputs = LinearCrossEntropyInputs
    Outputs = LinearCrossEntropyOutputs
    revisions = (7,)
    renamed = PER_ROW.renamed
    differentiable = ("x", "head", "head_bias")
    constants = ("penalty",)
    shardable = SHARDABLE_ROWS
    formed_early: ClassVar[Mapping[str, str]] = MappingProxyType({"x": "d_x", "head": "d_head", "head_bias": "d_head_bias"})

    def canonicalise(
        self,
        x: Any,
        targets: Any,
        head: Any,
        head_bias: Any = None,
        weights: Any = None,
        *,
        transpose_head: bool = False,
        logit_softcap: float | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Any = None,
    ) -> Bound:
        """Check and add the batch axis.

        Args:
            x: `[..., D]`, floating.
            targets: integers `[...]`.
            head: `[D, V]`, or `[V, D]` with transpose_head.
            head_bias: `[V]`.
            weights: `[...]`, a factor on each row's loss.
            transpose_head: head is `[V, D]`.
            logit_softcap: c > 0 in `c * tanh(l / c)`, or None.
            label_smoothing: in [0, 1].
            z_loss: >= 0.
            precision: None, "default", "high", "highest" or a `jax.lax.Precision`.
        """
        check_compute("head", head, ndim=2)
        bound = PER_ROW.canonicalise(
            x, targets, head, head_bias, transpose_head=transpose_head, logit_softcap=logit_softcap, precision=precision
        )
        smoothing = finite_number("label_smoothing", label_smoothing, at_least=0)
        if smoothing > 1:
            raise invalid("label_smoothing", smoothing, "a value in [0, 1]")
        if weights is not None:
            check_compute("weights", weights)
            check_shape("weights", weights, tuple(x.shape[:-1]), "one for each row")
            weights = weights[None].astype(statistics_dtype(str(x.dtype)))
        rows: CrossEntropyCall = bound.call
        inputs = LinearCrossEntropyInputs(*cast("CrossEntropyInputs", bound.inputs), weights)
        call = LinearCrossEntropyCall(
            **{name: ArraySpec.of(value) for name, value in named(inputs)},  # pyright: ignore[reportArgumentType]
            transpose_head=rows.transpose_head,
            logit_softcap=rows.logit_softcap,
            label_smoothing=smoothing,
            z_loss=finite_number("z_loss", z_loss, at_least=0),
            precision=rows.precision,
        )

        def finish(outputs: LinearCrossEntropyOutputs) -> tuple[Any, Any]:
            """total and penalty, scalars."""
            return outputs.total[0], jnp.zeros_like(outputs.total[0]) if outputs.penalty is None else outputs.penalty[0]

        return Bound(call, inputs, finish)

    def random_inputs(self, call: LinearCrossEntropyCall, rng: np.random.Generator, **given: Any) -> LinearCrossEntropyInputs:
        targets = rng.integers(0, call.vocabulary, call.targets.shape, np.int32)
        return super().random_inputs(call, rng, **{"targets": targets, **given})

    def dimensions(self, call: LinearCrossEntropyCall) -> Mapping[str, str]:
        rows = " ".join(row_dims(len(call.x.shape)))
        head = vocabulary.head_dims(call.transpose_head)
        return {
            **dict.fromkeys(("x", "d_x"), f"{rows} d"),
            "head": head,
            "head_bias": "b? v",
            "d_head": head.replace("?", ""),
            "d_head_bias": "b v",
            **dict.fromkeys(("targets", "weights"), rows),
            **dict.fromkeys(("total", "penalty"), "b"),
        }

    def output_specs(self, call: LinearCrossEntropyCall) -> LinearCrossEntropyOutputs:
        dtype = statistics_dtype(call.x.dtype)
        one = ArraySpec(call.x.shape[:1], dtype)
        penalty = one if call.z_loss else None
        if not call.save_residuals:
            return LinearCrossEntropyOutputs(one, penalty)

        def gradient(spec: ArraySpec | None) -> ArraySpec | None:
            if spec is None or not has_gradient(spec):
                return None
            return ArraySpec((call.x.shape[0], *spec.shape[1:]), spec.dtype)

        return LinearCrossEntropyOutputs(one, penalty, *map(gradient, (call.x, call.head, call.head_bias)))

    def public(self, call: LinearCrossEntropyCall) -> tuple[str, ...]:
        return ("total", "penalty") if call.z_loss else ("total",)

    def cost(self, call: LinearCrossEntropyCall, phase: Phase) -> Cost:
        forward, backward = (PER_ROW.cost(call.per_row, each) for each in ("forward", "backward"))
        gradients = sum(spec.nbytes for spec in (call.x, call.head, call.head_bias) if spec is not None)
        if phase == "backward":
            return Cost(gradients, 2 * gradients)
        # The logits' product is there already.
        return Cost(backward.flops, forward.bytes + gradients) if call.save_residuals else forward


def per_row_inputs(inputs: LinearCrossEntropyInputs) -> CrossEntropyInputs:
    return CrossEntropyInputs(inputs.x, inputs.targets, inputs.head, inputs.head_bias)


def row_cotangents(call: LinearCrossEntropyCall, lse: Any, d_rows: Any) -> CrossEntropyOutputs:
    """The cotangents of `cross_entropy`'s results, for those of the weighted rows `[b, ...]`."""
    s = call.label_smoothing
    return CrossEntropyOutputs(
        (1 - s) * d_rows, (s + 2 * call.z_loss * lse) * d_rows, -s / call.vocabulary * d_rows if s else None
    )


OPERATION = LinearCrossEntropy()

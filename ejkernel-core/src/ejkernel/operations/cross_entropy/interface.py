"""Contract of `cross_entropy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.operations.common import vocabulary as vocabulary
from ejkernel.operations.common.options import as_precision, as_soft_cap
from ejkernel.operations.common.rows.interface import SHARDABLE_ROWS, row_dims
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape

IGNORED = -1
"""The target of a row that takes no part."""


class CrossEntropyInputs(NamedTuple):
    """x `[b, ..., v]`, logits; or with a head `[b, ..., d]`, hidden states. targets int32 `[b, ...]`.

    head `[1 or b, d, v]`, or `[1 or b, v, d]` with `transpose_head`; head_bias `[1 or b, v]`.
    """

    x: Float[Array, "*rows w"]
    targets: Int32[Array, "*rows"]
    head: Float[Array, "#b _ _"] = None
    head_bias: Float[Array, "#b v"] = None


class CrossEntropyOutputs(NamedTuple):
    """Each `[b, ...]` in float32 (float64 of float64), 0 for an ignored row: `loss = lse - logit[target]`,
    `lse = log sum exp logits`, and the sum of the logits. Backward reads lse; there is no other residual."""

    loss: Float[Array, "*rows"]
    lse: Float[Array, "*rows"]
    logit_sum: Float[Array, "*rows"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropyCall(Call):
    """Static facts.

    Attributes:
        transpose_head: head is `[b, v, d]`.
        logit_softcap: c in `c * tanh(logits / c)`; -inf stays -inf.
        sum_logits: logit_sum is a public output.
        precision: of the products: None (full precision of the common dtype), or "default", "high", "highest".
    """

    x: ArraySpec
    targets: ArraySpec
    head: ArraySpec | None = None
    head_bias: ArraySpec | None = None
    transpose_head: bool = False
    logit_softcap: float | None = None
    sum_logits: bool = False
    precision: str | None = None

    @property
    def vocabulary(self) -> int:
        """v."""
        return vocabulary.vocabulary_of(self.x, self.head, self.transpose_head)


class CrossEntropy(Operation):
    """`loss = log(sum_v exp(l_v)) - l_target`, with `l = cap(x . head + head_bias)`, or `l = cap(x)` without a head.

    In float32 inside; with a head the logits of all rows are never there at once. A row whose target is -1 gives 0 and has no
    gradient, whatever x holds there, and takes no part in the head's. Any other target outside of the vocabulary means that the
    target is not one of these entries (but of another device's): the row's loss is its lse.
    """

    name = "cross_entropy"
    Call = CrossEntropyCall
    Inputs = CrossEntropyInputs
    Outputs = CrossEntropyOutputs
    revisions = (6,)
    renamed = (("soft_cap", "logit_softcap"),)
    differentiable = ("x", "head", "head_bias")
    shardable = SHARDABLE_ROWS

    def canonicalise(
        self,
        x: Any,
        targets: Any,
        head: Any = None,
        head_bias: Any = None,
        *,
        transpose_head: bool = False,
        logit_softcap: float | None = None,
        sum_logits: bool = False,
        precision: Any = None,
    ) -> Bound:
        """Check and add the batch axis.

        Args:
            x: `[..., V]`, or `[..., D]` with a head; floating.
            targets: integers `[...]`.
            head: `[D, V]`, or `[V, D]` with transpose_head.
            head_bias: `[V]`; needs a head.
            transpose_head: head is `[V, D]`.
            logit_softcap: c > 0 in `c * tanh(l / c)`, or None.
            sum_logits: return the sum of each row's logits too.
            precision: None, "default", "high", "highest" or a `jax.lax.Precision`.
        """
        transpose_head = vocabulary.as_flag("transpose_head", transpose_head)
        size = vocabulary.check_rows("x", x, head, "head", transpose_head)
        if head is None and (head_bias is not None or transpose_head):
            raise invalid("head", None, "a head beside head_bias or transpose_head")
        if head_bias is not None:
            check_compute("head_bias", head_bias)
            check_shape("head_bias", head_bias, (size,), "[V]")
        inputs = CrossEntropyInputs(
            x[None],
            vocabulary.as_labels("targets", targets, tuple(x.shape[:-1]))[None],
            None if head is None else head[None],
            None if head_bias is None else head_bias[None],
        )
        call = CrossEntropyCall(
            **{name: ArraySpec.of(value) for name, value in named(inputs)},  # pyright: ignore[reportArgumentType]
            transpose_head=transpose_head,
            logit_softcap=as_soft_cap(logit_softcap, "logit_softcap"),
            sum_logits=vocabulary.as_flag("sum_logits", sum_logits),
            precision=as_precision(precision),
        )

        def finish(outputs: CrossEntropyOutputs) -> CrossEntropyOutputs:
            return CrossEntropyOutputs(*(None if value is None else value[0] for value in outputs))

        return Bound(call, inputs, finish)

    def random_inputs(self, call: CrossEntropyCall, rng: np.random.Generator, **given: Any) -> CrossEntropyInputs:
        targets = rng.integers(0, max(call.vocabulary, 1), call.targets.shape, np.int32)
        return super().random_inputs(call, rng, **{"targets": targets, **given})

    def dimensions(self, call: CrossEntropyCall) -> Mapping[str, str]:
        rows = " ".join(row_dims(len(call.x.shape)))
        return {
            "x": f"{rows} {'v' if call.head is None else 'd'}",
            "head": vocabulary.head_dims(call.transpose_head),
            "head_bias": "b? v",
            **dict.fromkeys(("targets", "loss", "lse", "logit_sum"), rows),
        }

    def output_specs(self, call: CrossEntropyCall) -> CrossEntropyOutputs:
        rows = ArraySpec(call.x.shape[:-1], statistics_dtype(call.x.dtype))
        return CrossEntropyOutputs(rows, rows, rows if call.sum_logits else None)

    def public(self, call: CrossEntropyCall) -> tuple[str, ...]:
        return ("loss", "lse", "logit_sum") if call.sum_logits else ("loss", "lse")

    def cost(self, call: CrossEntropyCall, phase: Phase) -> Cost:
        logits = vocabulary.count_rows(call.x) * call.vocabulary
        product = 0 if call.head is None else 2 * logits * call.x.shape[-1]
        arrays = [spec for spec in (call.x, call.head, call.head_bias) if spec is not None]
        read = sum(spec.nbytes for spec in arrays) + call.targets.nbytes
        rows = sum(spec.nbytes for _, spec in named(self.output_specs(call)))
        if phase == "forward":
            return Cost(product + 5 * logits, read + rows)
        return Cost(3 * product + 5 * logits, 2 * read + 2 * rows)


OPERATION = CrossEntropy()

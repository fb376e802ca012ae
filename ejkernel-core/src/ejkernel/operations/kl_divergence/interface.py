"""Contract of `kl_divergence`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common import vocabulary as vocabulary
from ejkernel.operations.common.options import as_precision
from ejkernel.operations.common.rows.interface import SHARDABLE_ROWS, row_dims
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_shape, finite_number
from ejkernel.utils.dtypes import accumulator, common_dtype, multiplied
from ejkernel.utils.tracing import is_traced, traced_number

DIRECTIONS = ("forward", "reverse", "jsd")


class KlDivergenceInputs(NamedTuple):
    """student, teacher `[b, ..., v]`, logits; or each with its head `[b, ..., d]`, hidden states of their own width.

    student_head, teacher_head `[1 or b, d, v]`, or `[1 or b, v, d]` with `transpose_heads`; valid bool `[b, ...]`, None for all.
    """

    student: Float[Array, "*rows d"]
    teacher: Float[Array, "*rows e"]
    student_head: Float[Array, "#b _ _"] = None
    teacher_head: Float[Array, "#b _ _"] = None
    valid: Bool[Array, "*rows"] = None


class KlDivergenceOutputs(NamedTuple):
    """Each `[b, ...]` in float32 (float64 of float64), 0 for a row that is not valid: loss; and residuals: both log-sum-exps of
    `logits / temperature`, and slope, the sum over the vocabulary of the derivatives of the loss's terms by the student's
    log-probability."""

    loss: Float[Array, "*rows"]
    student_lse: Float[Array, "*rows"] = None
    teacher_lse: Float[Array, "*rows"] = None
    slope: Float[Array, "*rows"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlDivergenceCall(Call):
    """Static facts.

    Attributes:
        direction: "forward", "reverse" or "jsd".
        temperature: divides both logits.
        beta: weight of the teacher in the mixture; None unless "jsd".
        transpose_heads: heads are `[b, v, d]`.
        precision: of the products: None (full precision of the common dtype), or "default", "high", "highest".
    """

    student: ArraySpec
    teacher: ArraySpec
    student_head: ArraySpec | None = None
    teacher_head: ArraySpec | None = None
    valid: ArraySpec | None = None
    direction: str = "forward"
    temperature: float = 1.0
    beta: float | None = None
    transpose_heads: bool = False
    precision: str | None = None

    @property
    def vocabulary(self) -> int:
        """v."""
        return vocabulary.vocabulary_of(self.student, self.student_head, self.transpose_heads)


class KlDivergence(Operation):
    """With `s, t = softmax(student / temperature), softmax(teacher / temperature)` of each row: "forward" is
    `KL(t || s) = sum_v t log(t / s)`, "reverse" `KL(s || t)`, and "jsd" `beta KL(t || m) + (1 - beta) KL(s || m)` with
    `m = beta t + (1 - beta) s`.

    In float32 inside; where heads make the logits they are never all there at once. The teacher is a constant. A term whose
    leading probability is 0 is 0. Rows that are not valid give 0 and have no gradient, whatever they hold.
    """

    name = "kl_divergence"
    Call = KlDivergenceCall
    Inputs = KlDivergenceInputs
    Outputs = KlDivergenceOutputs
    revisions = (8,)
    differentiable = ("student", "student_head")
    shardable = SHARDABLE_ROWS
    traceable = ("temperature",)

    def canonicalise(
        self,
        student: Any,
        teacher: Any,
        student_head: Any = None,
        teacher_head: Any = None,
        valid: Any = None,
        *,
        direction: str = "forward",
        temperature: float = 1.0,
        beta: float | None = None,
        transpose_heads: bool = False,
        precision: Any = None,
    ) -> Bound:
        """Check and add the batch axis.

        Args:
            student: `[..., V]`, or `[..., D]` with student_head; floating.
            teacher: `[..., V]`, or `[..., D']` with teacher_head.
            student_head: `[D, V]`, or `[V, D]` with transpose_heads.
            teacher_head: `[D', V]`, or `[V, D']`.
            valid: bool `[...]`, which rows count; None = all.
            direction: "forward", "reverse" or "jsd".
            temperature: > 0. Traced, logits or hidden states are divided by it before, logits in float32.
            beta: in [0, 1], for "jsd" alone; None = 0.5 there. 0 is "forward" and 1 is "reverse".
            transpose_heads: heads are `[V, D]`.
            precision: None, "default", "high", "highest" or a `jax.lax.Precision`.
        """
        transpose_heads = vocabulary.as_flag("transpose_heads", transpose_heads)
        size = vocabulary.check_rows("student", student, student_head, "student_head", transpose_heads)
        other = vocabulary.check_rows("teacher", teacher, teacher_head, "teacher_head", transpose_heads)
        if size != other:
            raise invalid("teacher", f"a vocabulary of {other}", f"{size} as in student")
        if transpose_heads and student_head is None and teacher_head is None:
            raise invalid("transpose_heads", True, "False without heads")
        rows = tuple(student.shape[:-1])
        if tuple(teacher.shape[:-1]) != rows:
            raise invalid("teacher", f"rows {tuple(teacher.shape[:-1])}", f"{rows} as in student")
        if valid is not None:
            check_shape("valid", valid, rows, "one for each row")
            if valid.dtype != bool:
                raise wrong_type("valid", f"dtype {valid.dtype}", "bool")
        if direction not in DIRECTIONS:
            raise invalid("direction", repr(direction), f"one of {', '.join(DIRECTIONS)}")
        kind, weight = _mixture(beta, direction)
        if is_traced(temperature):
            factor = 1 / traced_number("temperature", temperature, accumulator(student.dtype))
            student, teacher = (
                multiplied(x if head is not None else x.astype(common_dtype(x.dtype, factor.dtype)), factor)
                for x, head in ((student, student_head), (teacher, teacher_head))
            )
            temperature = 1.0
        heat = finite_number("temperature", temperature)
        if heat <= 0:
            raise invalid("temperature", heat, "a value > 0")
        teacher, teacher_head = jax.lax.stop_gradient((teacher, teacher_head))
        arrays = (student, teacher, student_head, teacher_head, valid)
        inputs = KlDivergenceInputs(*(None if array is None else array[None] for array in arrays))
        call = KlDivergenceCall(
            **{name: ArraySpec.of(value) for name, value in named(inputs)},  # pyright: ignore[reportArgumentType]
            direction=kind,
            temperature=heat,
            beta=weight,
            transpose_heads=transpose_heads,
            precision=as_precision(precision),
        )
        return Bound(call, inputs, lambda outputs: outputs.loss[0])

    def random_inputs(self, call: KlDivergenceCall, rng: np.random.Generator, **given: Any) -> KlDivergenceInputs:
        """Most rows count."""
        if call.valid is not None:
            given = {"valid": rng.random(call.valid.shape) < 0.9, **given}
        return super().random_inputs(call, rng, **given)

    def dimensions(self, call: KlDivergenceCall) -> Mapping[str, str]:
        rows = " ".join(row_dims(len(call.student.shape)))
        heads = vocabulary.head_dims(call.transpose_heads)
        return {
            "student": f"{rows} {'v' if call.student_head is None else 'd'}",
            "teacher": f"{rows} {'v' if call.teacher_head is None else 'e'}",
            "student_head": heads,
            "teacher_head": heads.replace("d", "e"),
            **dict.fromkeys(("valid", "loss", "student_lse", "teacher_lse", "slope"), rows),
        }

    def output_specs(self, call: KlDivergenceCall) -> KlDivergenceOutputs:
        rows = ArraySpec(call.student.shape[:-1], statistics_dtype(call.student.dtype))
        saved = rows if call.save_residuals else None
        return KlDivergenceOutputs(rows, saved, saved, saved)

    def public(self, call: KlDivergenceCall) -> tuple[str, ...]:
        return ("loss",)

    def cost(self, call: KlDivergenceCall, phase: Phase) -> Cost:
        """The products once in each phase; an implementation that makes the logits twice does more."""
        logits = vocabulary.count_rows(call.student) * call.vocabulary
        sides = ((call.student, call.student_head), (call.teacher, call.teacher_head))
        products = [0 if head is None else 2 * logits * x.shape[-1] for x, head in sides]
        read = sum(spec.nbytes for pair in sides for spec in pair if spec is not None)
        rows = sum(spec.nbytes for _, spec in named(self.output_specs(call)))
        if phase == "forward":
            return Cost(sum(products) + 14 * logits, read + rows)
        moved = call.student.nbytes + (0 if call.student_head is None else call.student_head.nbytes)
        return Cost(sum(products) + 2 * products[0] + 14 * logits, read + moved + rows)


def _mixture(beta: Any, direction: str) -> tuple[str, float | None]:
    """direction and beta; at its end points "jsd" is one of the others."""
    if direction != "jsd":
        if beta is not None:
            raise invalid("beta", beta, f"None with direction {direction!r}")
        return direction, None
    weight = finite_number("beta", 0.5 if beta is None else beta)
    if not 0 <= weight <= 1:
        raise invalid("beta", weight, "a value in [0, 1]")
    return {0.0: ("forward", None), 1.0: ("reverse", None)}.get(weight, (direction, weight))


OPERATION = KlDivergence()

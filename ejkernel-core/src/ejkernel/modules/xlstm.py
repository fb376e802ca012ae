"""mLSTM, the matrix memory of xLSTM: linear attention whose gates are exponentials, kept relative to a running maximum."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.errors import invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.operations.linear_recurrence.interface import OPERATION as _LINEAR_RECURRENCE
from ejkernel.operations.linear_recurrence.matrix_memory import matrix_memory
from ejkernel.utils.checks import check_given, finite_number

__all__ = ["MLSTM", "mlstm"]


@public("initial_state", "cu_seqlens")
def mlstm(
    query: t.SequenceHeads,
    key: t.SequenceHeads,
    value: t.SequenceValues,
    input_gate: t.PerHead,
    forget_gate: t.PerHead,
    *,
    initial_state: t.MatrixMemory | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    forget_activation: t.ForgetActivation = "sigmoid",
    softmax_scale: t.Scalar | None = None,
    epsilon: t.Number = 1e-6,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SequenceOutput, t.NewMatrixMemory]:
    """mLSTM: `C_t = f_t C_(t-1) + i_t k_t v_t^T`, `n_t = f_t n_(t-1) + i_t k_t`, `h_t = C_t^T q_t / max(|n_t . q_t|, 1)`.

    `i = exp(input_gate)`, f is the sigmoid or the exponential of forget_gate, and the scale multiplies q. C and n are kept times
    `exp(-m_t)` with `m_t = max(log f_t + m_(t-1), input_gate_t)`, so no exponential exceeds 1; the divisor is
    `max(|n_t . q_t|, exp(-m_t)) + epsilon` of what is kept. The norm of h and the output gate are the caller's.

    Args:
        query: `[B,T,H,D]`, float32, bfloat16 or float16; any length.
        key: `[B,T,H,D]`.
        value: `[B,T,H,V]`.
        input_gate: `[B,T,H]`, before its exponential; -inf takes nothing in.
        forget_gate: `[B,T,H]`, before its activation; -inf forgets.
        initial_state: C `[B,H,D,V]`, n `[B,H,D]` and m `[B,H]`, C and n times `exp(-m)`; `[s,H,...]` with cu_seqlens of s
            sequences; None = zeros.
        cu_seqlens: cumulative lengths of packed sequences, integers, B = 1; as for `recurrent_attention`.
        forget_activation: "sigmoid", or "exp", for which forget_gate is the logarithm of f.
        softmax_scale: factor of query; None = `1 / sqrt(D)`.
        epsilon: added to the divisor, >= 0.
        cfg: config override for the chosen implementation of `linear_recurrence`.

    Returns:
        h `[B,T,H,V]` in the dtype of value, and the last state, float32. Gradients take m for a constant, as it cancels: those
        of h, and of what later calls make of the state, are exact but for epsilon.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.

    Source: Beck et al., xLSTM: Extended Long Short-Term Memory, 2024; xLSTM 7B, 2025, for epsilon.
    """
    arrays, options, run = split(locals(), "query key value input_gate forget_gate initial_state cu_seqlens")
    check_given(query=query, key=key, value=value, input_gate=input_gate, forget_gate=forget_gate)
    if initial_state is not None and (not isinstance(initial_state, tuple) or len(initial_state) != 3):
        raise wrong_type("initial_state", type(initial_state).__name__, "a tuple of three arrays, C, n and m")
    if forget_activation not in ("sigmoid", "exp"):
        raise invalid("forget_activation", repr(forget_activation), "'sigmoid' or 'exp'")
    options["epsilon"] = finite_number("epsilon", epsilon, at_least=0)
    return _LINEAR_RECURRENCE.invoke(arrays, options, form=matrix_memory, **run)


MLSTM = class_api("MLSTM", mlstm)

"""What the kernels are compiled for, as one constant."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.delta_rule.interface import DeltaRuleCall


@dataclasses.dataclass(frozen=True)
class Params:
    """Static facts of a call.

    Attributes:
        heads: H, the number of states of a sequence.
        query_heads, key_heads, value_heads: of these arrays.
        beta_heads, decay_heads: of these arrays; 0 where there are none.
        a_heads, b_heads: of the factors of the general form; 0 where there are none.
        width, channels: of key, of value.
        decay: "none", "scalar" (per head) or "channel" (per channel of key).
        exact_logs: whether decays per channel are numbers that products in bfloat16 take whole.
        reverse: whether time runs from the last token to the first.
        packed, shared: whether sequences are packed, and whether all members of the batch have the same bounds.
        normalised: whether query and key are divided by their lengths.
        scale: of the output.
        bfloat16: whether products are of bfloat16; else of float32 with `precision`, for float16 does not hold states.
        precision: of products of float32.
    """

    heads: int
    query_heads: int
    key_heads: int
    value_heads: int
    beta_heads: int
    decay_heads: int
    a_heads: int
    b_heads: int
    width: int
    channels: int
    decay: str
    exact_logs: bool
    reverse: bool
    packed: bool
    shared: bool
    normalised: bool
    scale: float
    bfloat16: bool
    precision: str


PRECISION = {"bfloat16": "tf32", "float16": "tf32x3", "float32": "tf32x3"}
"""Of products of float32. One product of TF32 has more digits than bfloat16, in which the inverse is stored; for float16 it has too
few: on an H100 outputs were off by more than 1e-3."""


def params_of(call: DeltaRuleCall) -> Params:
    def heads(name: str) -> int:
        spec = getattr(call, name)
        return 0 if spec is None else spec.shape[2]

    return Params(
        heads=call.heads,
        query_heads=heads("query"),
        key_heads=heads("key"),
        value_heads=heads("value"),
        beta_heads=heads("beta"),
        decay_heads=heads("decay"),
        a_heads=heads("a"),
        b_heads=heads("b"),
        width=call.query.shape[3],
        channels=call.value.shape[3],
        decay="none" if call.decay is None else "channel" if call.decays_by_channel else "scalar",
        exact_logs=call.decay is not None and call.decay.dtype == "bfloat16",
        reverse=call.reverse,
        packed=call.cu_seqlens is not None,
        shared=call.cu_seqlens is not None and call.cu_seqlens.shape[0] == 1,
        normalised=call.use_qk_l2norm,
        scale=call.softmax_scale,
        bfloat16=call.query.dtype == "bfloat16",
        precision=PRECISION[call.query.dtype],
    )

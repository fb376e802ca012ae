"""What a call says of its arrays and rows, as one `tl.constexpr`: the kernel is specialised for it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel.operations.paged_attention.interface import PagedAttentionCall, PagedAttentionInputs
from ejkernel_triton._numerics import DotPrecision, dot_precision
from ejkernel_triton._pages import batch_stride, storage, strides_of
from ejkernel_triton.paged_attention.schedule import UNBOUNDED


@dataclasses.dataclass(frozen=True)
class PagedAttentionParams:
    """The static parameters of the kernel, tiles aside.

    Attributes:
        scale: of the logits.
        width, channels: head sizes of query and key, of value.
        heads, key_heads: H, and heads of the pages.
        page_size: tokens of a page.
        key_page, key_token, key_head, key_batch: strides of the key pages.
        value_page, value_token, value_head, value_batch: strides of the value pages.
        first_value: offset of the first value.
        schedules, tables, sinks, slopes: 0 for none, 1 for one that the batch shares, 2 for one per batch member.
        bias: tokens of a row of the bias; 0 if absent.
        bias_batch, bias_request: its strides; 0 if shared.
        key_scales, value_scales: how many there are; 0 if absent.
        key_scale_batch, value_scale_batch: their strides; 0 if shared.
        causal: whether rows see no later keys.
        window: keys that a row sees; 0 for all.
        soft_cap: of the logits; 0 for none.
        save_lse: whether the log-sum-exp is stored.
        precision: `input_precision` of float32 dots.
    """

    scale: float
    width: int
    channels: int
    heads: int
    key_heads: int
    page_size: int
    key_page: int
    key_token: int
    key_head: int
    key_batch: int
    value_page: int
    value_token: int
    value_head: int
    value_batch: int
    first_value: int
    schedules: int
    tables: int
    sinks: int
    slopes: int
    bias: int
    bias_batch: int
    bias_request: int
    key_scales: int
    key_scale_batch: int
    value_scales: int
    value_scale_batch: int
    causal: bool
    window: int
    soft_cap: float
    save_lse: bool
    precision: DotPrecision


def params_of(call: PagedAttentionCall, inputs: PagedAttentionInputs, *, schedules: int, dtype: Any) -> PagedAttentionParams:
    """The parameters of a call.

    Args:
        call, inputs: the call, and its arrays as the kernel reads them.
        schedules: as `tables`, of the schedule.
        dtype: of the MMA operands.
    """
    key = strides_of(call.key_pages.shape, call.layout)
    value = key if call.value_pages is None else strides_of(call.value_pages.shape, call.layout)
    bias = inputs.qq_bias
    return PagedAttentionParams(
        scale=call.softmax_scale,
        width=call.query.shape[3],
        channels=call.value_size,
        heads=call.query.shape[2],
        key_heads=call.heads,
        page_size=call.pages.page_size,
        key_page=key.page,
        key_token=key.token,
        key_head=key.head,
        key_batch=key.batch,
        value_page=value.page,
        value_token=value.token,
        value_head=value.head,
        value_batch=value.batch,
        first_value=value.first_value,
        schedules=schedules,
        tables=storage(inputs.block_tables),
        sinks=storage(inputs.softmax_aux),
        slopes=storage(inputs.alibi_slopes),
        bias=0 if bias is None else bias.shape[3],
        bias_batch=batch_stride(bias),
        bias_request=0 if bias is None or bias.shape[1] == 1 else bias.shape[3] ** 2,
        key_scales=0 if inputs.key_scale is None else inputs.key_scale.shape[1],
        key_scale_batch=batch_stride(inputs.key_scale),
        value_scales=0 if inputs.value_scale is None else inputs.value_scale.shape[1],
        value_scale_batch=batch_stride(inputs.value_scale),
        causal=call.causal,
        window=0 if call.window is None else min(call.window, UNBOUNDED),
        soft_cap=0.0 if call.logits_soft_cap is None else call.logits_soft_cap,
        save_lse=call.return_lse or call.save_residuals,
        precision=dot_precision(call.precision, dtype),
    )

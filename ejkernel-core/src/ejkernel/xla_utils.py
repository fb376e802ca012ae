"""The name under which existing clients import `ejkernel.packing`, with the modules that it had once."""

from __future__ import annotations

from ejkernel.packing import (
    cdiv,
    chunk_global_cumsum,
    chunk_local_cumsum,
    identity_dtype_convert,
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
    reorder_sequence,
)
from ejkernel.utils.former_paths import former_module, same_names

__all__ = [
    "cdiv",
    "chunk_global_cumsum",
    "chunk_local_cumsum",
    "identity_dtype_convert",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "reorder_sequence",
]

utils = former_module("ejkernel.xla_utils.utils", same_names("ejkernel.packing", __all__))
cumsum = former_module(
    "ejkernel.xla_utils.cumsum", same_names("ejkernel.packing", ("chunk_global_cumsum", "chunk_local_cumsum"))
)

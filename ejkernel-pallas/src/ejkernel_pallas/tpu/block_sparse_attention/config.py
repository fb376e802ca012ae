"""Configs of `flash_attention` for `block_sparse_attention`."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention import dense
from ejkernel_pallas.tpu.flash_attention import config

FORWARD = dense.configs(config.FORWARD)
BACKWARD = dense.configs(config.BACKWARD)

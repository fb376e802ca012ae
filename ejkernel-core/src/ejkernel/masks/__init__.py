"""Attention masks: `MaskInfo`, which keeps what was said about visibility until a kernel needs it."""

from __future__ import annotations

from ejkernel.masks.info import MaskInfo

__all__ = ["MaskInfo"]

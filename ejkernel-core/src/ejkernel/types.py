"""Types that users and clients import by name."""

from __future__ import annotations

from ejkernel.masks import MaskInfo

__all__ = ["MaskInfo"]

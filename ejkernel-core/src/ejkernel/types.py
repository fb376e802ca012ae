"""Types that users and clients import by name."""

from __future__ import annotations

from ejkernel.masks import MaskInfo
from ejkernel.utils.former_paths import former_module, same_names

__all__ = ["MaskInfo"]

mask = former_module("ejkernel.types.mask", same_names("ejkernel.masks", __all__))

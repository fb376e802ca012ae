"""The default order of `native_sparse_selection`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import UNMEASURED

ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": UNMEASURED}}

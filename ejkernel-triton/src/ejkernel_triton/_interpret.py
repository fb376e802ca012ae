"""Whether kernels run in Triton's interpreter on the host, as `EJKERNEL_TRITON_INTERPRET=1` asks."""

from __future__ import annotations

import os

INTERPRET = "EJKERNEL_TRITON_INTERPRET"


def interpreting() -> bool:
    """Read when a program is traced; one that is compiled already stays what it is."""
    return os.environ.get(INTERPRET, "0") not in ("", "0")

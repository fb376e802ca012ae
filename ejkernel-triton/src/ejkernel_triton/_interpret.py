"""Whether kernels run in Triton's interpreter on the host, as `EJKERNEL_TRITON_INTERPRET=1` asks."""

from __future__ import annotations

import os

INTERPRET = "EJKERNEL_TRITON_INTERPRET"


def interpreting() -> bool:
    """Read when plugins are discovered (then kernels run on CPU targets too) and whenever a program is traced.

    A program that is compiled already stays what it is.
    """
    return os.environ.get(INTERPRET, "0") not in ("", "0")

"""Whether kernels run in Triton's interpreter on the host, as `EJKERNEL_TRITON_INTERPRET=1` asks."""

from __future__ import annotations

import os

INTERPRET = "EJKERNEL_TRITON_INTERPRET"


def interpreting() -> bool:
    """Read when plugins are discovered (kernels then also run on CPU targets) and whenever a program is traced.

    Compiled programs are not affected.
    """
    return os.environ.get(INTERPRET, "0") not in ("", "0")

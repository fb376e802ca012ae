"""Performance knobs of `rms_norm`."""

from __future__ import annotations

from ejkernel_cuda._rows.config import BACKWARD, FORWARD

__all__ = ["BACKWARD", "FORWARD"]

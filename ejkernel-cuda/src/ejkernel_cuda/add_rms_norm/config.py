"""Performance knobs of `add_rms_norm`."""

from __future__ import annotations

from ejkernel_cuda._rows.config import ADDED_BACKWARD as BACKWARD, ADDED_FORWARD as FORWARD

__all__ = ["BACKWARD", "FORWARD"]

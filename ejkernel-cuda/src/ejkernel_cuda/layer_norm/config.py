"""Performance knobs of `layer_norm`."""

from __future__ import annotations

from ejkernel_cuda._rows.config import CENTRED_BACKWARD as BACKWARD, CENTRED_FORWARD as FORWARD

__all__ = ["BACKWARD", "FORWARD"]

"""Performance knobs of `layer_norm`."""

from __future__ import annotations

from ejkernel_triton._rows.config import BACKWARD, FORWARD

__all__ = ["BACKWARD", "FORWARD"]

"""Named problems of `rms_norm`."""

from __future__ import annotations

from ejkernel.operations.common.rows.cases import NORM_CASES, NORM_TOGGLES

CASES = NORM_CASES
TOGGLES = NORM_TOGGLES

"""Which calls of `rms_norm` these kernels run."""

from __future__ import annotations

from ejkernel_cuda._rows.capability import supports_norm

supports_forward = supports_norm
supports_backward = supports_norm

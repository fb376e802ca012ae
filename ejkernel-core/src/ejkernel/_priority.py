"""Which platform runs first where several can: data, justified by the measurements in `benchmarks/results`.

Operation -> backend -> platform or implementation id -> standing; larger is preferred. XLA stands at 0 and whatever is absent
below it: another platform joins the table once a committed measurement shows where it beats XLA.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_ORDER: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    # benchmarks/results/rms_norm_h200.json: forward 1.04 to 1.10 times as fast as XLA, backward 1.61 to 1.64 times
    "rms_norm": {"gpu": {"triton": 10}},
}

UNMEASURED = -1

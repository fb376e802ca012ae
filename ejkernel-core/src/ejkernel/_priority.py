"""Which platform runs first where several can: data, justified by the measurements in `benchmarks/results`.

Operation -> backend -> platform or implementation id -> standing; larger is preferred. XLA stands at 0 and whatever is absent
below it: another platform joins the table once a committed measurement shows where it beats XLA.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_ORDER: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    # benchmarks/results/bench_h200.json: 8 times as fast as XLA forward and 5 times backward in bfloat16, 3 times forward in float32
    "flash_attention": {"gpu": {"triton": 10}},
    # benchmarks/results/grouped_matmul_h200.json: 14 times as fast as XLA on large groups, 20 times on small ones
    "grouped_matmul": {"gpu": {"triton": 10}},
    # benchmarks/results/rows_h200.json, against XLA over several shapes in bfloat16.
    # forward 1.07 to 2.2 times as fast as XLA, backward 1.08 to 2.7 times
    "layer_norm": {"gpu": {"triton": 10}},
    # forward 1.30 times (packed sequences over 200 times), backward 2.5 times
    "mean_pooling": {"gpu": {"triton": 10}},
    # benchmarks/results/paged_h200.json: decode 5 to 140 times as fast as XLA, 1.8 to 1.9 times as JAX's Pallas kernel
    "paged_attention": {"gpu": {"triton": 10}},
    # benchmarks/results/rows_h200.json: 0.99 to 1.00 times in both phases, 1.4 times with the gradients of cos and sin
    "rope": {"gpu": {"triton": 10}},
    # benchmarks/results/rows_h200.json: forward 1.03 to 1.5 times, backward 1.03 to 1.8 times
    "softmax": {"gpu": {"triton": 10}},
    # benchmarks/results/rms_norm_h200.json: forward 1.04 to 1.10 times as fast as XLA, backward 1.61 to 1.64 times
    "rms_norm": {"gpu": {"triton": 10}},
}

UNMEASURED = -1

"""Which platform runs first where several can: data, justified by the measurements in `benchmarks/results`.

Operation -> backend -> platform or implementation id -> standing; larger is preferred. XLA stands at 0 and whatever is absent
below it: another platform joins the table once a committed measurement shows where it beats XLA. Where that holds for some dtypes
only, `"<backend> <dtype>"`, with the dtype of the call's first array, takes the place of the backend.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_ORDER: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    # benchmarks/results/bench_h200.json: forward 5 to 21 times as fast as XLA in bfloat16, backward 2.2 to 15 times; forward in
    # float32 3.4 times (flash_attention_kernels_h200.json)
    "flash_attention": {"gpu": {"triton": 10}},
    # benchmarks/results/bench_h200.json: 3.1 to 4.9 times forward, 3.8 to 7.5 times backward. float32 was not timed
    "grouped_matmul": {"gpu": {"triton": 10}, "gpu float32": {}},
    # benchmarks/results/rows_h200.json, against XLA over several shapes in bfloat16.
    # forward 1.07 to 2.2 times as fast as XLA, backward 1.08 to 2.7 times
    "layer_norm": {"gpu": {"triton": 10}},
    # benchmarks/results/linear_recurrence_h200.json: 26 to 28 times forward, 5 to 20 times backward. float32 was not timed
    "linear_recurrence": {"gpu": {"triton": 10}, "gpu float32": {}},
    # benchmarks/results/rows_h200.json: forward 1.30 times (packed sequences over 200 times), backward 2.5 times
    "mean_pooling": {"gpu": {"triton": 10}},
    # benchmarks/results/paged_h200.json: decode 5 to 140 times as fast as XLA, 1.8 to 1.9 times as JAX's Pallas kernel
    "paged_attention": {"gpu": {"triton": 10}},
    # benchmarks/results/bench_h200.json: an update of 64 requests takes a kernel 3.4 us, XLA's scatters 22 us and more
    "paged_cache_update": {"gpu": {"triton": 10}},
    # benchmarks/results/rows_h200.json: 0.99 to 1.00 times in both phases, 1.4 times with the gradients of cos and sin
    "rope": {"gpu": {"triton": 10}},
    # benchmarks/results/rows_h200.json: forward 1.03 to 1.5 times, backward 1.03 to 1.8 times
    "softmax": {"gpu": {"triton": 10}},
    # benchmarks/results/rms_norm_h200.json: forward 1.04 to 1.10 times as fast as XLA, backward 1.61 to 1.64 times
    "rms_norm": {"gpu": {"triton": 10}},
}

UNMEASURED = -1


def default_order(operation: str, backend: str, dtype: str) -> Mapping[str, int]:
    """The standings of one kind of call."""
    orders = DEFAULT_ORDER.get(operation, {})
    return orders.get(f"{backend} {dtype}", orders.get(backend, {}))

"""Which platform runs first where several can: data, justified by the measurements in `benchmarks/results`.

Operation -> backend -> platform or implementation id -> standing; larger is preferred. XLA stands at 0, what was slower below it,
and whatever is absent below that: another platform joins the table once it was measured. Where it does so for some calls
only, a rule takes the place of the number: a function of call and phase that says where the platform stands for this one, and why
it is not where it stands at best. Rules live here and not in plugins, as they compare platforms. `tests/test_default_order.py`
holds every one against the recorded times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.operations.flash_attention.interface import FlashAttentionCall
    from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall
    from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
    from ejkernel.operations.paged_attention.interface import PagedAttentionCall
    from ejkernel.plugin import Phase

UNMEASURED = -2
_BEHIND_XLA, _PORTABLE = -1, 0
_BEHIND_TRITON, _TRITON, _BEHIND_MOSAIC_GPU, _AHEAD_OF_TRITON, _FIRST = 5, 10, 15, 20, 30
_HALVES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where an implementation stands for one call; `reason` says why that is lower than it stands at best."""

    level: int
    reason: str = ""


Rule = Callable[[Any, "Phase"], Standing]


def _linear_recurrence_on_triton(call: LinearRecurrenceCall, phase: Phase) -> Standing:
    """benchmarks/results: 11 to 30 times as fast as XLA forward (bench_h200.json), 5 to 20 times backward (also
    linear_recurrence_h200.json); in float32 4.5 times forward (bench_float32_h200.json)."""
    if phase == "backward" and call.query.dtype not in _HALVES:
        return Standing(UNMEASURED, f"gradients in {call.query.dtype} were not timed")
    return Standing(_TRITON)


def _attention_on_mosaic_gpu(call: FlashAttentionCall, phase: Phase) -> Standing:
    """benchmarks/results/bench_h200.json, flash_attention_mosaic_gpu_h200.json, narrow_window_mosaic_gpu_h200.json and
    bias_mosaic_gpu_h200.json, ms at B2 T8192 unless said:

    H32/8 D128 causal                   forward 1.67, Triton 2.13    backward 5.90, Triton 6.36
    H16 D128 causal                     forward 0.914, Triton 1.17   backward 2.92, Triton 3.53
    H16 D128                            forward 1.60, Triton 2.15    backward 5.27, Triton 6.42
    H32 D64                             forward 2.05, Triton 2.47    backward 6.89, Triton 6.96
    H16/8 D128 window 4096 soft cap     forward 0.888, Triton 1.56   backward 2.73, Triton 4.00
    H16/8 D256 window 4096 soft cap     forward 1.41, Triton 2.18    backward 7.67, Triton 10.1
    H16 D192/128 causal                 forward 1.05, Triton 1.88    backward 4.30, Triton 9.15
    H16/4 D128 causal T32768 8 segments forward 1.01, Triton 1.36    backward 3.22, Triton 4.55
    H64/8 D64 window 128                forward 0.209, Triton 0.283  backward 0.966, Triton 0.713
    H16 D128 causal, bias of pairs      forward 1.33, Triton 24.6    backward 6.61, Triton 27.2
    H16 D128 causal, bias of keys       forward 1.17, Triton 14.5    backward 4.71, Triton 18.3

    Phases are chosen apart, as each reads nothing of the other but output and log-sum-exp. Long calls took XLA at least twice as
    long in every case.
    """
    width = call.window_width
    if few := _few_tokens(call):
        return few
    if untimed := _untimed_attention(call):
        return Standing(_BEHIND_TRITON, f"{untimed} were not timed")
    if width is not None and width < _NARROW_WINDOW:
        if phase == "backward":
            return Standing(_BEHIND_TRITON, "gradients under a window of 128 keys took 0.97 ms, Triton's 0.71 ms")
        if not _packs(call):
            return Standing(_BEHIND_TRITON, "under a window of 128 keys it was faster where 8 heads or more share keys alone")
    return Standing(_AHEAD_OF_TRITON)


def _attention_on_cuda(call: FlashAttentionCall, phase: Phase) -> Standing:
    """benchmarks/results/bench_cuda_attention_h200.json, forward in ms at B2 T8192:

    H32/8 D128 causal               1.69, Mosaic GPU 1.66, Triton 2.14
    H16 D128 causal                 0.881, Mosaic GPU 0.912, Triton 1.17
    H16 D128                        1.63, Mosaic GPU 1.59, Triton 2.17
    H32 D64                         2.02, Mosaic GPU 2.06, Triton 2.48
    H16/8 D256 window 4096 soft cap 1.35, Mosaic GPU 1.40, Triton 2.19
    H64/8 D64 window 128            0.259, Mosaic GPU 0.347 (0.209 since, with packed heads), Triton 0.286

    and 1.48 at H16 D192/128 causal (flash_attention_cuda_h200.json), Mosaic GPU 1.05, Triton 1.88.
    """
    width = call.window_width
    if few := _few_tokens(call):
        return few
    if untimed := _untimed_attention(call):
        return Standing(_BEHIND_TRITON, f"{untimed} were not timed")
    shared = call.query.shape[2] > call.key.shape[2]
    narrow, wide = width is not None and width < _NARROW_WINDOW and not _packs(call), call.value.shape[3] > 128
    if narrow or wide or (call.causal and not shared):
        return Standing(_FIRST)
    return Standing(
        _BEHIND_MOSAIC_GPU, "for heads up to 128 that share keys, or see all of them, Mosaic GPU's was as fast or faster"
    )


def _attention_on_cudnn(call: FlashAttentionCall, phase: Phase) -> Standing:
    """benchmarks/results/bench_cuda_attention_h200.json, of the cases above: 1.76, 0.962, 1.60, 2.24, none, 0.280 ms."""
    if phase == "backward":
        return Standing(UNMEASURED, "its gradients were not timed through this platform")
    return _few_tokens(call) or Standing(_BEHIND_TRITON, "on an H200 another kernel was faster in every case")


def _layer_norm_on_cuda(call: Any, phase: Phase) -> Standing:
    """benchmarks/results/rows_cuda_h200.json, ms in bfloat16:

    16384x4096  forward 0.078, Triton 0.068, XLA 0.086      backward 0.116, Triton 0.103, XLA 0.275
    131072x128  forward 0.0204, Triton 0.0183, XLA 0.0196   backward 0.0360, Triton 0.0360, XLA 0.0606
    8192x16384  forward 0.143, Triton 0.139, XLA 0.301      backward 0.216, Triton 0.335, XLA 0.608
    2048x32768  forward 0.081, Triton 0.082, XLA 0.159      backward 0.146, Triton 0.174, XLA 0.191

    With a scale alone XLA is faster forward than it is here (bench_cuda_rows_h200.json).
    """
    if _wide_halves(call):
        return Standing(_FIRST if phase == "backward" else _BEHIND_TRITON, "" if phase == "backward" else _TRITON_WAS_FASTER)
    if phase == "forward":
        halves = call.x.dtype in _HALVES
        why = "forward over up to 8192 columns XLA's was faster" if halves else f"{call.x.dtype} was not timed"
        return Standing(_BEHIND_XLA, why)
    return Standing(_BEHIND_TRITON, _TRITON_WAS_FASTER)


def _rms_norm_on_cuda(call: Any, phase: Phase) -> Standing:
    """As above; and over wide rows

    8192x16384   forward 0.143, Triton 0.199, XLA 0.192   backward 0.231, Triton 0.332, XLA 0.351
    1024x131072  forward 0.140, Triton 0.168, XLA 0.230   backward 0.303, Triton 0.328, XLA 0.370
    """
    return Standing(_FIRST) if _wide_halves(call) else _layer_norm_on_cuda(call, phase)


def _paged_attention_on_cuda(call: PagedAttentionCall, phase: Phase) -> Standing:
    """benchmarks/results/bench_cuda_pages_h200.json, decoding from bfloat16: 1.00 and 1.05 times Triton's time;
    bench_cuda_float8_pages_h200.json, from float8_e4m3fn: 0.161 ms and 0.0836 ms, Triton 0.292 and 0.145."""
    one_each = call.query.shape[1] <= call.kv_lens.shape[1]
    if one_each and call.key_pages.dtype == "float8_e4m3fn":
        return Standing(_FIRST)
    return Standing(_BEHIND_TRITON, "it was faster for one new token of each request and pages of float8_e4m3fn alone")


_TRITON_WAS_FASTER = "Triton's was as fast or faster"


def _wide_halves(call: Any) -> bool:
    """Rows beyond those that Triton's kernels keep, as far as they were timed."""
    return call.x.dtype in _HALVES and 8192 < call.x.shape[-1] <= 131072


_TIMED_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
_FEWEST_TOKENS = 1024
_NARROW_WINDOW = 1024
"""Keys; between 128 and 4096 nothing was timed, and from here on most tiles of a row are seen whole."""
_PACKED_WINDOW = 256
"""Keys; up to here Mosaic GPU's forward kernel packs the heads that share keys."""
_UNTIMED_ATTENTION = {
    "sinks": "sinks",
    "query_positions": "positions",
    "key_positions": "positions",
    "chunk_size": "chunks",
    "prefix": "prefixes",
}


def _few_tokens(call: FlashAttentionCall) -> Standing | None:
    tokens = min(call.query.shape[1], call.key.shape[1])
    if tokens >= _FEWEST_TOKENS:
        return None
    return Standing(UNMEASURED, f"{tokens} tokens, fewer than {_FEWEST_TOKENS}, were not timed")


def _packs(call: FlashAttentionCall) -> bool:
    """Whether Mosaic GPU's forward kernel has the query heads of a key head as rows, under a narrow window."""
    group, width = call.query.shape[2] // call.key.shape[2], call.window_width
    return width is not None and width <= _PACKED_WINDOW and group % 8 == 0 and 64 % group == 0 and call.query_segments is None


def _untimed_attention(call: FlashAttentionCall) -> str:
    """What of a call is far from all that was timed; empty if nothing is."""
    size, value_size = call.query.shape[3], call.value.shape[3]
    if (size, value_size) not in _TIMED_HEADS:
        return f"heads of {size} with values of {value_size}"
    return next((what for field, what in _UNTIMED_ATTENTION.items() if getattr(call, field) is not None), "")


_FEWEST_ROWS = 256
_UNTIMED_PRODUCTS = {
    "existing_out": "added results",
    "rhs_scale": "scaled matrices",
    "bias": "biases",
    "lhs_scale": "scaled rows",
}


def _grouped_matmul_on_mosaic_gpu(call: GroupedMatmulCall, phase: Phase) -> Standing:
    """benchmarks/results/bench_h200.json, ms with 1024 rows for each matrix:

    8192 rows, 8 x 4096 x 14336     forward 1.22, Triton 1.24    backward 2.49, Triton 2.65
    32768 rows, 32 x 7168 x 4096    forward 2.43, Triton 2.44    backward 5.01, Triton 5.33
    131072 rows, 128 x 2048 x 768   forward 0.553, Triton 0.584  backward 1.15, Triton 1.27
    """
    rows, groups = call.lhs.shape[1], call.rhs.shape[1]
    if rows < _FEWEST_ROWS * groups:
        return Standing(UNMEASURED, f"{rows} rows for {groups} matrices, fewer than {_FEWEST_ROWS} for each, were not timed")
    if untimed := _untimed_product(call):
        alone = call.in_float8 or call.lhs_scale is not None  # Triton runs neither: behind it would be before XLA
        return Standing(UNMEASURED if alone else _BEHIND_TRITON, f"{untimed} were not timed")
    return Standing(_AHEAD_OF_TRITON)


def _untimed_product(call: GroupedMatmulCall) -> str:
    """What of a call is far from all that was timed; empty if nothing is."""
    inner = call.lhs.shape[2]
    if call.in_float8:
        return f"products of {call.lhs.dtype}"
    if inner % 64 or call.columns % 64:
        return f"matrices of {inner} x {call.columns}, which are copied to multiples of 64,"
    if call.preferred_element_type not in _HALVES:
        return f"results in {call.preferred_element_type}"
    return next((what for field, what in _UNTIMED_PRODUCTS.items() if getattr(call, field) is not None), "")


DEFAULT_ORDER: Mapping[str, Mapping[str, Mapping[str, int | Rule]]] = {
    # benchmarks/results/bench_cuda_rows_h200.json: CUDA's 1.35 to 1.37 times as fast as XLA forward, 1.5 to 1.9 times backward
    "add_rms_norm": {"gpu": {"cuda": _FIRST}},
    # benchmarks/results/bench_h200.json: Triton's forward 5 to 21 times as fast as XLA in bfloat16, backward 2.2 to 15 times;
    # forward in float32 3.3 times (bench_float32_h200.json)
    "flash_attention": {
        "gpu": {
            "triton": _TRITON,
            "pallas.mosaic_gpu": _attention_on_mosaic_gpu,
            "cuda": _attention_on_cuda,
            "cuda.cudnn": _attention_on_cudnn,
        }
    },
    # benchmarks/results/bench_h200.json: Triton 3.1 to 4.9 times forward, 3.8 to 7.6 times backward; in float32 1.25 to 1.4 and
    # 1.02 to 1.4 times (bench_float32_h200.json)
    "grouped_matmul": {"gpu": {"triton": _TRITON, "pallas.mosaic_gpu": _grouped_matmul_on_mosaic_gpu}},
    # benchmarks/results/rows_h200.json, against XLA over several shapes in bfloat16.
    # forward 1.07 to 2.2 times as fast as XLA, backward 1.08 to 2.7 times
    "layer_norm": {"gpu": {"triton": _TRITON, "cuda": _layer_norm_on_cuda}},
    "linear_recurrence": {"gpu": {"triton": _linear_recurrence_on_triton}},
    # benchmarks/results/rows_h200.json: forward 1.30 times (packed sequences over 200 times), backward 2.5 times
    "mean_pooling": {"gpu": {"triton": _TRITON}},
    # benchmarks/results/paged_h200.json: decode 5 to 140 times as fast as XLA, 1.8 to 1.9 times as JAX's Pallas kernel
    "paged_attention": {"gpu": {"triton": _TRITON, "cuda": _paged_attention_on_cuda}},
    # benchmarks/results/bench_h200.json: an update of 64 requests takes a kernel 3.4 us, XLA's scatters 22 us and more;
    # bench_cuda_pages_h200.json: CUDA's 4.1 us
    "paged_cache_update": {"gpu": {"triton": _TRITON, "cuda": _BEHIND_TRITON}},
    # benchmarks/results/bench_cuda_rows_h200.json: CUDA's 1.36 times as fast as XLA forward; rows_cuda_h200.json: 3.7 times
    # backward
    "qk_norm_rope": {"gpu": {"cuda": _FIRST}},
    # benchmarks/results/rows_h200.json: 0.99 to 1.00 times in both phases, 1.4 times with the gradients of cos and sin;
    # rows_cuda_h200.json: CUDA's takes 1.06 to 1.13 times XLA's time
    "rope": {"gpu": {"triton": _TRITON, "cuda": _BEHIND_XLA}},
    # benchmarks/results/rows_h200.json: forward 1.03 to 1.5 times, backward 1.03 to 1.8 times; rows_cuda_h200.json: CUDA's forward
    # 0.97 to 2.0 times as fast as XLA, backward 1.4 to 1.7 times, at best what Triton's is
    "softmax": {"gpu": {"triton": _TRITON, "cuda": _BEHIND_TRITON}},
    # benchmarks/results/rms_norm_h200.json: forward 1.04 to 1.10 times as fast as XLA, backward 1.61 to 1.64 times
    "rms_norm": {"gpu": {"triton": _TRITON, "cuda": _rms_norm_on_cuda}},
}


def standing_of(name: str, operation: str, backend: str, call: Any, phase: Phase) -> Standing:
    """Where an implementation, named by its id, stands for one phase of a call. What is listed for its platform holds for it."""
    order = DEFAULT_ORDER.get(operation, {}).get(backend, {})
    platform = name.partition(".")[0]
    listed = order.get(name, order.get(platform, _PORTABLE if platform == "xla" else UNMEASURED))
    return Standing(listed) if isinstance(listed, int) else listed(call, phase)

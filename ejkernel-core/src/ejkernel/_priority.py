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
_BEHIND_TRITON, _TRITON, _BEHIND_MOSAIC_GPU, _AHEAD_OF_TRITON, _FIRST, _AHEAD_OF_CUDA = 5, 10, 15, 20, 30, 40
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
    """benchmarks/results/bench_mosaic_gpu_attention_h200.json, orders_mosaic_gpu_h200.json (D192/128, the cap),
    flash_attention_mosaic_gpu_h200.json (segments) and bias_mosaic_gpu_h200.json (gradients under a bias of keys), ms at B2 T8192
    unless said:

    H32/8 D128 causal                   forward 1.62, Triton 2.12    backward 5.48, Triton 6.54
    H16 D128 causal                     forward 0.873, Triton 1.16   backward 2.79, Triton 3.53
    H16 D128                            forward 1.56, Triton 2.15    backward 5.23, Triton 6.45
    H32 D64                             forward 2.03, Triton 2.47    backward 6.49, Triton 6.96
    H16/8 D128 window 4096 soft cap     forward 0.781, Triton 1.56   backward 2.50, Triton 3.98
    H16/8 D256 window 4096 soft cap     forward 1.15, Triton 2.21    backward 7.24, Triton 10.1
    H16 D192/128 causal                 forward 1.04, Triton 1.88    backward 4.27, Triton 9.15
    H16/4 D128 causal T32768 8 segments forward 1.01, Triton 1.36    backward 3.22, Triton 4.55
    H64/8 D64 window 128                forward 0.203, Triton 0.286  backward 0.969, Triton 0.712
    H16 D128 causal, bias `[1,1,T,T]`   forward 1.23, Triton 1.76    backward 5.30, Triton 9.78
    H16 D128 causal, bias of keys       forward 1.00, Triton 1.72    backward 4.71

    Phases are chosen apart, as each reads nothing of the other but output and log-sum-exp. Long calls took XLA at least twice as
    long in every case. A few queries over many keys are in bench_cuda_chunks_h200.json, below.
    """
    width = call.window_width
    if few := _few_tokens(call, phase):
        return few
    if _is_chunk(call) and call.query.shape[1] > _FEW_QUERIES:
        return Standing(_BEHIND_TRITON, f"over many keys it was faster for up to {_FEW_QUERIES} queries alone")
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

    H32/8 D128 causal               1.66, Mosaic GPU 1.60, Triton 2.12
    H16 D128 causal                 0.869, Mosaic GPU 0.860, Triton 1.17
    H16 D128                        1.57, Mosaic GPU 1.56, Triton 2.15
    H32 D64                         2.03, Mosaic GPU 2.02, Triton 2.47
    H16/8 D256 window 4096 soft cap 1.31, Mosaic GPU 1.14 (where a cap bounds weights), Triton 2.19
    H64/8 D64 window 128            0.259, Mosaic GPU 0.203 (with packed heads), Triton 0.282

    and 1.48 at H16 D192/128 causal (flash_attention_cuda_h200.json), Mosaic GPU 1.05, Triton 1.88. In bench_cuda_chunks_h200.json,
    of one sequence, keys at the end of which the queries are:

    1 query, 131072 keys, H32/8 D128           0.139, Mosaic GPU 1.08, Triton 1.30, XLA 4.30
    16 queries, 32768 keys, H32/8 D128 causal  0.0463, Mosaic GPU 0.358, Triton 0.444, XLA 1.18
    256 queries, 32768 keys, H16/4 D128 causal 0.121, Mosaic GPU 0.411, Triton 0.360, XLA 1.84
    512 queries, 8192 keys, H16 D64            0.0531, Mosaic GPU 0.0976, Triton 0.0738, XLA 0.504
    4096 queries and keys, H9 D128             0.128, Mosaic GPU 0.156, Triton 0.213, XLA 1.90
    """
    width = call.window_width
    if few := _few_tokens(call, phase):
        return few
    if untimed := _untimed_attention(call):
        return Standing(_BEHIND_TRITON, f"{untimed} were not timed")
    shared = call.query.shape[2] > call.key.shape[2]
    narrow = width is not None and width < _NARROW_WINDOW and not _packs(call)
    sees_all = not call.causal and call.window is None
    wide = call.value.shape[3] > 128
    if narrow or ((wide or sees_all or _is_chunk(call) or (call.causal and not shared)) and call.soft_cap is None):
        return Standing(_FIRST)
    return Standing(
        _BEHIND_MOSAIC_GPU,
        "under a cap, and for heads up to 128 that share keys under a mask, Mosaic GPU's was as fast or faster",
    )


def _attention_on_cudnn(call: FlashAttentionCall, phase: Phase) -> Standing:
    """benchmarks/results/bench_cuda_attention_h200.json, of the first four cases above: forward 1.73, 0.954, 1.57, 2.24 ms; of one
    query over 131072 keys 0.127 (bench_cuda_chunks_h200.json). bench_mosaic_gpu_attention_h200.json: backward, which adds up in any
    order and is refused where that is not allowed, 5.04, 2.62, 4.56, 5.76 ms, Mosaic GPU's 5.48, 2.79, 5.23, 6.49; with a window of
    128, forward 0.279 ms."""
    if few := _few_tokens(call, phase):
        return few
    if phase == "forward":
        if _is_chunk(call) and call.query.shape[1] == 1:
            return Standing(_AHEAD_OF_CUDA)
        return Standing(_BEHIND_TRITON, "on an H200 another kernel was faster for more than one query")
    if untimed := _untimed_attention(call):
        return Standing(_BEHIND_TRITON, f"{untimed} were not timed")
    if call.window is not None or call.value.shape[3] > 128:
        return Standing(_BEHIND_TRITON, "its gradients were timed without windows, with heads up to 128")
    return Standing(_FIRST)


def _layer_norm_on_cuda(call: Any, phase: Phase) -> Standing:
    """benchmarks/results/rows_cuda_h200.json, ms in bfloat16, and of the first forward bench_cuda_rows_h200.json:

    16384x4096   forward 0.067, Triton 0.069, XLA 0.074      backward 0.105, XLA 0.273
    131072x128   forward 0.0174, Triton 0.0179, XLA 0.0194   backward 0.0308, Triton 0.0359, XLA 0.0601
    1048576x64   forward 0.063, Triton 0.064, XLA 0.067      backward 0.102, Triton 0.107, XLA 0.192
    1048576x128  forward 0.128, Triton 0.125, XLA 0.132      backward 0.198, Triton 0.205, XLA 0.396
    262144x512   forward 0.130, Triton 0.127, XLA 0.166      backward 0.212, Triton 0.203, XLA 0.516
    65536x1024   forward 0.066, Triton 0.064, XLA 0.088      backward 0.106, Triton 0.106, XLA 0.259
    8192x8192    forward 0.066, Triton 0.067, XLA 0.080      backward 0.111, Triton 0.105, XLA 0.271
    8192x16384   forward 0.131, Triton 0.139, XLA 0.299      backward 0.203, Triton 0.355, XLA 0.605
    2048x32768   forward 0.069, Triton 0.081, XLA 0.158      backward 0.111, Triton 0.176, XLA 0.190
    2048x65536   forward 0.138, Triton 0.174, XLA 0.303      backward 0.217, Triton 0.344, XLA 0.371
    1024x131072  forward 0.139, Triton 0.178, XLA 0.296      backward 0.237, Triton 0.338, XLA 0.376

    and of the first in an earlier run: forward 0.067, Triton 0.068; backward 0.105, Triton 0.103.
    """
    return _norm_on_cuda(call, phase, 4096)


def _norm_on_cuda(call: Any, phase: Phase, fewest: int) -> Standing:
    """`fewest`: columns from which on it is ahead forward; between 128 and 1024 `rms_norm` was not timed."""
    if call.x.dtype not in _HALVES:
        return Standing(_BEHIND_XLA if phase == "forward" else _BEHIND_TRITON, f"{call.x.dtype} was not timed")
    columns = call.x.shape[-1]
    ahead = fewest <= columns <= _MOST_COLUMNS if phase == "forward" else columns <= 128 or _wide_halves(call)
    if ahead:
        return Standing(_FIRST)
    return Standing(_BEHIND_TRITON, _TRITON_WAS_FASTER)


def _rms_norm_on_cuda(call: Any, phase: Phase) -> Standing:
    """In the same file, and for the first in bench_cuda_rows_h200.json, too, forward 0.067, Triton 0.072:

    16384x4096   forward 0.065, Triton 0.065, XLA 0.079      backward 0.113, Triton 0.101, XLA 0.191
    131072x128   forward 0.0173, Triton 0.0175, XLA 0.0184   backward 0.0302, Triton 0.0366, XLA 0.0547
    8192x16384   forward 0.134, Triton 0.197, XLA 0.191      backward 0.205, Triton 0.343, XLA 0.352
    2048x32768   forward 0.070, Triton 0.078, XLA 0.120      backward 0.110, Triton 0.174, XLA 0.184
    2048x65536   forward 0.137, Triton 0.181, XLA 0.232      backward 0.206, Triton 0.340, XLA 0.360
    1024x131072  forward 0.138, Triton 0.168, XLA 0.229      backward 0.215, Triton 0.336, XLA 0.371
    """
    return _norm_on_cuda(call, phase, 1024)


def _softmax_on_cuda(call: Any, phase: Phase) -> Standing:
    """In rows_cuda_h200.json:

    32768x4096   forward 0.130, Triton 0.128, XLA 0.154      backward 0.183, Triton 0.185, XLA 0.314
    131072x128   forward 0.0175, Triton 0.0175, XLA 0.0179   backward 0.0251, Triton 0.0248, XLA 0.0288
    8192x16384   forward 0.129, Triton 0.135, XLA 0.392      backward 0.200, Triton 0.194, XLA 0.309
    2048x32768   forward 0.066, Triton 0.074, XLA 0.162      backward 0.099, Triton 0.102, XLA 0.159
    2048x65536   forward 0.130, Triton 0.169, XLA 0.309      backward 0.192, Triton 0.231, XLA 0.312
    1024x128256  forward 0.125, Triton 0.190, XLA 0.305      backward 0.193, Triton 0.198, XLA 0.305
    1024x131072  forward 0.129, Triton 0.168, XLA 0.307      backward 0.197, Triton 0.202, XLA 0.310
    """
    return Standing(_FIRST) if _wide_halves(call) else Standing(_BEHIND_TRITON, _TRITON_WAS_FASTER)


def _rope_on_cuda(call: Any, phase: Phase) -> Standing:
    """benchmarks/results/bench_cuda_rows_h200.json: forward 0.169 ms, Triton 0.166, XLA 0.166; backward 0.377, Triton 0.326, XLA
    0.467, and without gradients of cosines and sines 0.164, Triton 0.166, XLA 0.165 (rows_cuda_h200.json)."""
    if phase == "forward":
        return Standing(_BEHIND_XLA, "XLA takes as long, and may fuse it with what stands beside it")
    return Standing(_BEHIND_TRITON, _TRITON_WAS_FASTER)


def _paged_attention_on_cuda(call: PagedAttentionCall, phase: Phase) -> Standing:
    """benchmarks/results/bench_cuda_pages_h200.json, decoding from bfloat16: 0.247 ms for 64 requests, Triton 0.264, and for one
    of 131072 tokens 0.125, Triton 0.128, and 0.253, 0.270, 0.128, 0.131 on another H200 (bench_cuda_pages_again_h200.json);
    bench_cuda_float8_pages_again_h200.json, from float8_e4m3fn: 0.133 ms and 0.0704 ms, Triton 0.294 and 0.145. In between
    (decoding_few_h200.json; other heads than H32/8 with an earlier form of CUDA's), microseconds:

    H32/8 D128 1 x 1024    9.7, Triton 7.8      H64/8 D64 1 x 1024    10.9, Triton 7.7
    H32/8 D128 1 x 8192    16.1, Triton 18.4    H64/8 D64 1 x 8192    14.8, Triton 14.0
    H32/8 D128 4 x 4096    24.6, Triton 30.2    H64/8 D64 1 x 32768   27.3, Triton 28.9
    H32/8 D128 8 x 1024    17.2, Triton 22.5    H64/8 D64 8 x 1024    15.4, Triton 17.6
    H32/8 D128 16 x 8192   131, Triton 140      H32/32 D128 1 x 1024  13.2, Triton 12.6
    """
    requests = call.query.shape[0] * call.kv_lens.shape[1]
    if call.query.shape[1] > call.kv_lens.shape[1]:
        return Standing(_BEHIND_TRITON, "it was faster for one new token of each request alone")
    if call.key_pages.dtype == "float8_e4m3fn":
        return Standing(_FIRST)
    if call.key_pages.dtype in _HALVES:
        stored = 2 * requests * call.longest * call.heads * (call.query.shape[3] + call.value_size)  # bytes
        many = requests >= _MANY_REQUESTS or stored >= _MANY_STORED_BYTES
        return Standing(_FIRST) if many else Standing(_BEHIND_TRITON, "Triton's was faster for a short request")
    return Standing(_BEHIND_TRITON, f"pages of {call.key_pages.dtype} were not timed beside Triton's")


_MANY_REQUESTS = 8
_MANY_STORED_BYTES = 2**25
"""Of keys and values that block tables have room for: lengths are not known before a program runs."""
_MOST_COLUMNS = 131072
"""That were timed."""
_TRITON_WAS_FASTER = "Triton's was as fast or faster"


def _wide_halves(call: Any) -> bool:
    """Rows beyond those over which Triton's kernels are as fast, as far as they were timed."""
    return call.x.dtype in _HALVES and 8192 < call.x.shape[-1] <= _MOST_COLUMNS


_TIMED_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
_FEWEST_TOKENS = 1024
_FEW_QUERIES, _MANY_KEYS = 16, 8192
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


def _few_tokens(call: FlashAttentionCall, phase: Phase) -> Standing | None:
    tokens = min(call.query.shape[1], call.key.shape[1])
    if tokens >= _FEWEST_TOKENS or (phase == "forward" and _is_chunk(call)):
        return None
    return Standing(UNMEASURED, f"{tokens} tokens, fewer than {_FEWEST_TOKENS}, were not timed")


def _is_chunk(call: FlashAttentionCall) -> bool:
    """A few queries over as many keys as were timed with them."""
    return call.query.shape[1] < _FEWEST_TOKENS and call.key.shape[1] >= _MANY_KEYS and call.window is None


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
    # benchmarks/results/bench_cuda_rows_h200.json: CUDA's 1.5 times as fast as XLA forward, 1.5 to 2.0 times backward
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
    # bench_cuda_pages_h200.json: CUDA's 4.2 us
    "paged_cache_update": {"gpu": {"triton": _TRITON, "cuda": _BEHIND_TRITON}},
    # benchmarks/results/bench_cuda_rows_h200.json: CUDA's 1.35 times as fast as XLA forward, 2.7 times backward
    "qk_norm_rope": {"gpu": {"cuda": _FIRST}},
    # benchmarks/results/rows_h200.json: 0.99 to 1.00 times in both phases, 1.4 times with the gradients of cos and sin
    "rope": {"gpu": {"triton": _TRITON, "cuda": _rope_on_cuda}},
    # benchmarks/results/rows_h200.json: forward 1.03 to 1.5 times as fast as XLA, backward 1.03 to 1.8 times
    "softmax": {"gpu": {"triton": _TRITON, "cuda": _softmax_on_cuda}},
    # benchmarks/results/rms_norm_h200.json: forward 1.04 to 1.10 times as fast as XLA, backward 1.61 to 1.64 times
    "rms_norm": {"gpu": {"triton": _TRITON, "cuda": _rms_norm_on_cuda}},
}


def standing_of(name: str, operation: str, backend: str, call: Any, phase: Phase) -> Standing:
    """Where an implementation, named by its id, stands for one phase of a call. What is listed for its platform holds for it."""
    order = DEFAULT_ORDER.get(operation, {}).get(backend, {})
    platform = name.partition(".")[0]
    listed = order.get(name, order.get(platform, _PORTABLE if platform == "xla" else UNMEASURED))
    return Standing(listed) if isinstance(listed, int) else listed(call, phase)

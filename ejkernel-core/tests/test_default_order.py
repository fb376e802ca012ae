"""The order that holds where no setting names a platform: what it depends on, and what `explain` says of it.

Made-up distributions of the platforms' names support every call, so that the order alone decides.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

PLATFORMS = {"triton": "", "pallas": "mosaic_gpu", "xla": ""}

EXPLAIN = """
    import json, sys, types
    import jax
    trusting = sys.modules["ejkernel._plugins.identity"] = types.ModuleType("identity")
    trusting.complaint = lambda *claim: None  # who bears the platforms' names is not asked here
    import ejkernel
    from ejkernel._dispatch.explanation import Captured, capture
    from ejkernel.operations import get_operation

    def array(text):
        dtype, *sizes = text.split()
        return jax.ShapeDtypeStruct(tuple(map(int, sizes)), dtype)

    def explained(operation, arrays, options):
        with capture():
            try:
                get_operation(operation).invoke(arrays, options)
            except Captured as captured:
                return captured.explanation

    found = []
    for operation, arrays, options, target in json.loads(sys.stdin.read()):
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        with ejkernel.use(target=target):
            explanation = explained(operation, {name: array(text) for name, text in arrays.items()}, options)
        for decision in (explanation.forward, explanation.backward):
            found.append({v.candidate.id: [v.verdict, "; ".join(v.reasons)] for v in decision.verdicts})
    print(json.dumps(found))
"""


@pytest.fixture
def explained(site, python):
    """`explained(*calls)` is `{id: [verdict, reasons]}`, best first, for both phases of every call that any platform runs."""
    for platform, variant in PLATFORMS.items():
        records = [
            f"Implementation({operation!r}, target='os:getcwd', phase={phase!r}, variant={variant!r})"
            for operation in ("flash_attention", "grouped_matmul", "linear_recurrence")
            for phase in ("forward", "backward")
        ]
        site.plugin(platform, f"ejkernel-{platform}", implementations=f"({', '.join(records)},)")

    def ask(*calls: Any, **environment: str) -> list[tuple[dict[str, list[str]], dict[str, list[str]]]]:
        code = EXPLAIN.replace("sys.stdin.read()", repr(json.dumps(calls)))
        both = json.loads(python(code, EJKERNEL_PLUGINS="triton,pallas,xla", **environment))
        return list(zip(both[::2], both[1::2], strict=True))

    return ask


def chosen(verdicts: dict[str, list[str]]) -> str:
    return next(name for name, (verdict, _) in verdicts.items() if verdict == "chosen")


def attention(size: int = 128, tokens: int = 8192, dtype: str = "bfloat16", key_heads: int = 16, **options: Any) -> Any:
    query, key = (f"{dtype} 2 {tokens} {heads} {size}" for heads in (16, key_heads))
    return ["flash_attention", {"query": query, "key": key, "value": key}, options, "gpu:9.0"]


def products(rows: int = 8192, inner: int = 4096, columns: int = 14336, dtype: str = "bfloat16", **options: Any) -> Any:
    arrays = {"lhs": f"{dtype} {rows} {inner}", "rhs": f"{dtype} 8 {inner} {columns}", "group_sizes": "int32 8"}
    return ["grouped_matmul", arrays, options, "gpu:9.0"]


def recurrence(dtype: str) -> Any:
    return ["linear_recurrence", dict.fromkeys(("query", "key", "value"), f"{dtype} 2 256 4 64"), {}, "gpu:9.0"]


def test_it_depends_on_the_call_and_the_phase(explained):
    calls = {
        ("pallas.mosaic_gpu", "pallas.mosaic_gpu", ""): [
            attention(),
            attention(causal=True),
            attention(causal=True, sliding_window=[4095, 0]),
            attention(dtype="float16"),
            attention(64),
            attention(256, logits_soft_cap=30.0),
            products(),
        ],
        ("pallas.mosaic_gpu", "triton", "gradients under a window of 128 keys took 0.97 ms, Triton's 0.71 ms"): [
            attention(64, causal=True, sliding_window=[127, 0], key_heads=2),
            attention(sliding_window=[300, 300], key_heads=2),
        ],
        ("triton", "triton", "gradients under a window of 128 keys took 0.97 ms, Triton's 0.71 ms"): [
            attention(64, causal=True, sliding_window=[127, 0]),
        ],
        ("triton", "triton", "heads of 48 with values of 48 were not timed"): [attention(48)],
        ("triton", "triton", "1 tokens, fewer than 128, were not timed"): [attention(tokens=1)],
        ("triton", "pallas.mosaic_gpu", ""): [products(64), attention(tokens=256, causal=True)],
        ("triton", "triton", "matrices of 4096 x 1000, which are copied to multiples of 64, were not timed"): [
            products(columns=1000)
        ],
        ("triton", "triton", "results in float32 were not timed"): [products(preferred_element_type="float32")],
    }
    found = iter(explained(*(call for listed in calls.values() for call in listed)))
    for (forward, backward, reason), listed in calls.items():
        for call in listed:
            both = next(found)
            assert [chosen(verdicts) for verdicts in both] == [forward, backward], call
            expected = ["available", f"lower priority: {reason}"] if backward == "triton" else ["chosen", ""]
            assert both[1]["pallas.mosaic_gpu"] == expected, call


def test_arrays_that_were_not_timed(explained):
    with_bias, scaled_rows = products(), products()
    with_bias[1].update(bias="bfloat16 8 14336")
    scaled_rows[1].update(lhs_scale="float32 8192")
    calls = (attention(causal=True, chunk_size=1024), with_bias, scaled_rows, products(dtype="float8_e4m3fn"))
    whats = ("chunks", "biases", "scaled rows", "products of float8_e4m3fn")
    for (forward, _), what in zip(explained(*calls), whats, strict=True):
        assert chosen(forward) == "triton"
        assert forward["pallas.mosaic_gpu"] == ["available", f"lower priority: {what} were not timed"]
        never_run = what in whats[2:]
        assert [*forward].index("xla") == (1 if never_run else 2), what


def test_attention_with_a_bias(explained):
    biased = attention(causal=True)
    biased[1].update(bias="bfloat16 1 16 8192 8192")
    ((forward, backward),) = explained(biased)
    assert chosen(forward) == chosen(backward) == "pallas.mosaic_gpu"


def test_what_was_not_timed_stands_below_the_portable_platform_and_what_loses_to_another_does_not(explained):
    calls = [attention(tokens=64), attention(64, sliding_window=[127, 0])]
    unmeasured, behind = (forward for forward, _ in explained(*calls))
    assert [*unmeasured] == ["triton", "xla", "pallas.mosaic_gpu"]
    assert [*behind] == ["triton", "pallas.mosaic_gpu", "xla"]
    unmeasured, behind = (forward for forward, _ in explained(*calls, EJKERNEL_FORBID="triton"))
    assert (chosen(unmeasured), chosen(behind)) == ("xla", "pallas.mosaic_gpu")


def test_a_platform_that_is_named_or_alone_runs_all_the_same(explained):
    for setting in ({"EJKERNEL_PLATFORM": "pallas"}, {"EJKERNEL_FORBID": "triton,xla"}):
        ((forward, backward),) = explained(attention(tokens=64), **setting)
        assert chosen(forward) == chosen(backward) == "pallas.mosaic_gpu"
        reason = "" if "EJKERNEL_PLATFORM" in setting else "lower priority: 64 tokens, fewer than 128, were not timed"
        assert forward["pallas.mosaic_gpu"] == ["chosen", reason]


def test_recurrences_in_float32(explained):
    ((forward, backward),) = explained(recurrence("float32"))
    assert (chosen(forward), chosen(backward)) == ("triton", "triton")


def test_a_device_without_measurements_stays_with_the_portable_platform(explained):
    ((forward, _),) = explained([*attention()[:3], "tpu"])
    assert chosen(forward) == "xla"
    assert [*forward] == ["xla", "pallas.mosaic_gpu", "triton"]

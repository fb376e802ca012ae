"""Where the time of a training step goes on a real GPU: its kernels by kind and by name, and the gaps between them.

    python profile_step.py --out FILE.json -- --model llama --size 1.3b --batch 4 --remat dots

What follows `--` is of `python -m ejkernel_train`. Two steps are traced after three. Times of kernels are those of the profiler;
`wall` is the median of ten steps without it.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

STEPS = 2
KINDS = (
    ("attention", r"attention|flash|fmha|cudnn"),
    ("recurrence", r"delta_rule|selective_scan|linear_recurrence|state_space|chunk"),
    ("grouped product", r"grouped"),
    ("product", r"gemm|cublas|nvjet|cutlass|xmma|dot"),
    ("loss", r"cross_entropy|softmax"),
    ("quantize", r"quantize"),
    ("row", r"norm|rope|gated_linear|conv1d|moe_"),
    ("copy", r"copy|memcpy|memset|dynamic.update|transpose"),
)
"""By the names of a kernel and of what XLA made it for; the first that is found counts."""


def kind_of(text: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, text, re.IGNORECASE)), "fusion of XLA")


def kernels(folder: Path) -> list[dict[str, Any]]:
    """Every kernel on a GPU's streams, in its order: name, begin and seconds."""
    import jax

    (file,) = folder.rglob("*.xplane.pb")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                stats = dict(event.stats)
                made_for = f"{stats.get('hlo_op', '')} {stats.get('tf_op', stats.get('name', ''))}"
                found.append({"name": event.name, "for": made_for, "begin": event.start_ns, "ns": event.duration_ns})
    return sorted(found, key=lambda each: each["begin"])


def summary(found: list[dict[str, Any]], steps: float = STEPS) -> dict[str, Any]:
    """Milliseconds of one step by kind, by name, and without any kernel."""
    if not found:
        return {"kernels": []}  # as on a CPU
    kinds: dict[str, float] = defaultdict(float)
    names: dict[tuple[str, str], list[float]] = defaultdict(list)
    busy, end = 0.0, 0.0
    for each in found:
        kinds[kind_of(f"{each['name']} {each['for']}")] += each["ns"]
        names[re.sub(r"[.\d]+$", "", each["name"])[:90], re.sub(r"[.\d]+", "", each["for"])[-110:]].append(each["ns"])
        busy += max(0, each["begin"] + each["ns"] - max(end, each["begin"]))
        end = max(end, each["begin"] + each["ns"])
    span = end - found[0]["begin"]
    scale = 1e-6 / steps
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:80]
    return {
        "step_ms": round(span * scale, 3),
        "without_kernels_ms": round((span - busy) * scale, 3),
        "kinds_ms": {kind: round(ns * scale, 3) for kind, ns in sorted(kinds.items(), key=lambda item: -item[1])},
        "kernels": [
            {"ms": round(sum(each) * scale, 3), "calls": len(each) / steps, "name": name, "for": made_for}
            for (name, made_for), each in longest
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shown", type=int, default=25, help="kernels that are printed")
    parser.add_argument("asked", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    import jax

    from ejkernel_train import __main__ as trainer, cost, data, report

    arguments = trainer.parser().parse_args([each for each in options.asked if each != "--"])
    (config,) = trainer.configure(arguments)
    tokens = data.load(arguments.text)
    build = report.Build(config)
    for step in range(13):
        build.advance(data.batch(tokens, config.seed, step, config.batch, config.length))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for step in range(STEPS):
                build.advance(data.batch(tokens, config.seed, step, config.batch, config.length))
        found = summary(kernels(Path(folder)))
    wall, operations = statistics.median(build.seconds[3:13]), cost.step_operations(config, build.state.model)
    found = {
        **report.summary(config, build.state, None),
        "wall_ms": round(wall * 1e3, 3),
        "tokens_per_second": round(config.batch * config.length / wall),
        "share": round(operations / wall / (cost.peak_rate() or 989e12), 4),
        "bytes": report.program_bytes(build.compiled.program),
        "compile_seconds": round(build.compiled.compile_seconds, 1),
        "implementations": report.implementations(build.compiled.program),
        **found,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "kernels"}))
    for each in found["kernels"][: options.shown]:
        print(f"{each['ms']:9.3f} ms {each['calls']:6.0f}  {each['name'][:60]}  {each['for'][-90:]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run EasyDeL 0.3.0 on ejkernel, on CPU: every job, a table, and a JSON file. See README.md beside this file.

python tests/clients/easydel/run.py --out benchmarks/results/easydel_cpu.json [--only training:llama:*]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MESH = 4
"""Virtual devices of the CPU for the jobs on a mesh, which run in a process of their own: EasyDeL's mesh takes all devices."""

MECHANISMS = {
    "vanilla": "attention",
    "flash_attn2": "flash_attention",
    "sdpa": "scaled_dot_product_attention",
    "blocksparse": "blocksparse_attention",
    "ring": "ring_attention",
    "ragged_page_attention_v2": "ragged_page_attention_v2",
    "ragged_page_attention_v3": "ragged_page_attention_v3",
}
"""EasyDeL's mechanisms, and the function of ejkernel that each must have called."""

EXPECTED = {
    "training:gpt_oss:sdpa": "EasyDeL's sdpa mechanism passes no sinks on, so it computes another model",
}
"""Jobs whose difference is the client's own, and why; they fail if there is no difference."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of the client; `name` is `kind:family:mechanism[:further]`."""

    name: str
    run: Callable[[], dict[str, Any]]
    functions: tuple[str, ...]

    @property
    def devices(self) -> int:
        return MESH if self.name.endswith(":mesh") else 1


def jobs() -> list[Job]:
    """All of them, the cheap ones first."""
    from families import FAMILIES

    made: list[Job] = []
    for family, described in FAMILIES.items():
        for mechanism in ("vanilla", "flash_attn2", "sdpa", "blocksparse", "ring") if described.attention else ("vanilla",):
            made.append(training(family, mechanism))
    made += [
        training("llama", "flash_attn2", "remat", remat=True),
        training("llama", "flash_attn2", "mesh", axes=(2, 1, 1, 2, 1)),
        training("llama", "blocksparse", "mesh", axes=(1, 2, 1, 2, 1)),
        training("llama", "ring", "mesh", axes=(1, 1, 1, 2, 2)),
        training("mistral", "ring", "mesh", axes=(1, 1, 1, 1, 4)),
    ]
    for family, described in FAMILIES.items():
        for mechanism in ("vanilla", "flash_attn2") if described.attention else ("vanilla",):
            made.append(generation(family, mechanism))
    made += [generation("llama", mechanism) for mechanism in ("sdpa", "blocksparse", "ring")]
    made += [generation(family, "vanilla", whole_cache=True) for family in ("mistral", "gemma2", "gpt_oss")]
    for family in ("llama", "qwen3", "mistral", "gpt_oss"):
        made += [serving(family, mechanism) for mechanism in ("ragged_page_attention_v3", "ragged_page_attention_v2")]
    return made


def training(family: str, mechanism: str, further: str = "", **options: Any) -> Job:
    """Loss and gradients of one step."""

    def run() -> dict[str, Any]:
        import training as kind

        return kind.compare(family, mechanism, **options)

    return Job(":".join(filter(None, ("training", family, mechanism, further))), run, functions(family, mechanism))


def generation(family: str, mechanism: str, whole_cache: bool = False) -> Job:
    """`generate()`; with EasyDeL's cache, or with one that keeps every key."""

    def run() -> dict[str, Any]:
        import generation as kind

        return (kind.compare_whole_cache if whole_cache else kind.compare)(family, mechanism)

    further = ":whole_cache" if whole_cache else ""
    return Job(f"generation:{family}:{mechanism}{further}", run, functions(family, mechanism))


def serving(family: str, mechanism: str) -> Job:
    """The paged engine."""

    def run() -> dict[str, Any]:
        import serving as kind

        return kind.compare(family, mechanism)

    return Job(f"serving:{family}:{mechanism}", run, functions(family, mechanism))


def functions(family: str, mechanism: str) -> tuple[str, ...]:
    """Functions of ejkernel without which a job proves nothing."""
    own = {
        "mamba": ("state_space_v1",),
        "mamba2": ("state_space_v2",),
        "qwen3_next": ("gated_delta_rule", "grouped_matmul"),
        **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), ("grouped_matmul",)),
    }
    return (*(() if family in ("mamba", "mamba2") else (MECHANISMS[mechanism],)), *own.get(family, ()))


def perform(job: Job) -> dict[str, Any]:
    """Run one job; its verdict is `pass`, `fail`, `error`, `absent` or `client` (a difference that is the client's own)."""
    import evidence

    evidence.count()
    evidence.calls.clear()
    start = time.perf_counter()
    try:
        result = job.run()
    except NotImplementedError as error:
        result = {"verdict": "absent" if "is not in this version" in str(error) else "error", "problem": _problem(error)}
    except Exception as error:  # noqa: BLE001 - whatever a client's job raises is its result, and the run fails by it
        traceback.print_exc()
        result = {"verdict": "error", "problem": _problem(error)}
    else:
        uncalled = [name for name in job.functions if not evidence.calls[name]]
        result["verdict"] = "pass" if result.pop("ok") else "fail"
        if uncalled:
            result |= {"verdict": "fail", "problem": f"never called: {', '.join(uncalled)}"}
    if job.name in EXPECTED:
        result |= {"verdict": {"fail": "client", "pass": "fail"}.get(result["verdict"], result["verdict"])}
        result["problem"] = EXPECTED[job.name]
    return {"job": job.name, **result, "calls": dict(evidence.calls), "seconds": round(time.perf_counter() - start, 1)}


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:400]


def record(results: list[dict[str, Any]], missing: dict[str, list[str]]) -> dict[str, Any]:
    """The JSON document."""
    import ejkernel

    versions = {
        name: importlib.metadata.version(name) for name in ("easydel", "eformer", "flax", "jax", "jaxlib", "transformers")
    }
    core = importlib.metadata.version("ejkernel-core")
    platforms = sorted(one.name for one in ejkernel.kernel_registry.records if one.ok)
    return {
        "versions": {"ejkernel-core": core, "python": platform.python_version(), **versions},
        "platforms": platforms,
        "missing_names": missing,
        "tolerances": _tolerances(),
        "verdicts": dict(collections.Counter(result["verdict"] for result in results)),
        "jobs": results,
    }


def _tolerances() -> dict[str, float]:
    import training as kind

    return {"loss, relative": kind.LOSS_TOLERANCE, "gradient, of each parameter's largest": kind.GRADIENT_TOLERANCE}


def show(result: dict[str, Any]) -> None:
    """One line of the table."""
    numbers = [f"{name} {result[name]:.1e}" for name in ("loss_error", "gradient_error") if name in result]
    if "tokens" in result:
        numbers.append(f"{result['equal']} of {result['tokens']} tokens")
    said = "; ".join(filter(None, (", ".join(numbers), result.get("problem", ""))))
    print(f"{result['verdict']:7} {result['job']:48} {result['seconds']:6.1f} s  {said}", flush=True)


def main() -> int:
    """Returns 0 if every job passed, or differs by the client's own doing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="JSON file; jobs that it already has and that are not run again are kept")
    parser.add_argument("--only", default=["*"], nargs="+", help="patterns of job names, e.g. 'training:llama:*'")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [job for job in jobs() if any(fnmatch.fnmatch(job.name, pattern) for pattern in options.only)]
    if options.list:
        print("\n".join(job.name for job in chosen))
        return 0
    if options.devices is None:
        commands = [[sys.executable, *sys.argv, "--devices", str(count)] for count in (1, MESH)]
        return sum(subprocess.run(command, check=False).returncode for command in commands)
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={options.devices}"
    os.environ["XLA_FLAGS"] = flags
    chosen = [job for job in chosen if job.devices == options.devices]
    return run_all(chosen, options.out) if chosen else 0


def run_all(chosen: list[Job], out: Path | None) -> int:
    """Run jobs in this process; returns how many neither passed nor differ by the client's own doing."""
    import shim

    missing = shim.install()
    import easydel

    easydel.LlamaConfig  # noqa: B018 - imports all of its models, so that their calls can be counted
    kept: dict[str, dict[str, Any]] = {}
    if out and out.exists():
        kept = {result["job"]: result for result in json.loads(out.read_text())["jobs"]}
    for job in chosen:
        kept[job.name] = result = perform(job)
        show(result)
        if out:
            ordered = [kept[known.name] for known in jobs() if known.name in kept]
            out.write_text(json.dumps(record(ordered, missing), indent=1) + "\n")
    return sum(kept[job.name]["verdict"] not in ("pass", "client") for job in chosen)


if __name__ == "__main__":
    sys.exit(min(main(), 1))

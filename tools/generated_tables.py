"""Write the generated tables of the pages, from the plugins' records, the metadata and what is recorded in benchmarks/results, and
the measured numbers in their text (tools/measured.py).

python tools/generated_tables.py            rewrite the pages
python tools/generated_tables.py --check    exit 1 if one is out of date
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ejkernel._plugins.settings import VARIABLES
from ejkernel_bench._document import Case, Document, Run, read_document
from ejkernel_bench._history import Compared, newest
from ejkernel_bench._order import as_dispatched_now
from ejkernel_bench._standing import Standing, standing

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import default_order  # noqa: E402 - scripts beside this one, also where a test loads this file
import hardware_table  # noqa: E402
import training_tables  # noqa: E402
from measured import filled  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BEHIND = 0.95
"""Time of a peer over ours, by the median, below which a case is listed though the interval of its ratio includes 1."""

PLATFORMS = ("xla", "triton", "pallas", "cuda")


def declared() -> dict[str, dict[str, dict[str, set[str]]]]:
    """platform -> operation -> phase -> backends, from the plugin modules of this checkout."""
    found: dict[str, dict[str, dict[str, set[str]]]] = {}
    for name in PLATFORMS:
        sys.path.insert(0, str(ROOT / f"ejkernel-{name}" / "src"))
        plugin = importlib.import_module(f"ejkernel_{name}._plugin").ejkernel_plugin()
        operations = found.setdefault(name, {})
        for record in plugin.implementations:
            operations.setdefault(record.operation, {}).setdefault(record.phase, set()).update(record.backends)
    return found


def reports() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("conformance_*.json"))]


def evidence(platform: str, operation: str, found: list[dict[str, Any]]) -> list[str]:
    """One line for every device on which the conformance suite ran: of the run with the most failures, then the most cases."""
    lines: dict[str, tuple[int, int, str]] = {}
    for report in found:
        outcome = report["operations"].get(operation)
        if report["platform"] == platform and outcome:
            totals = {key: sum(level[key] for level in outcome["levels"].values()) for key in ("pass", "refused", "fail")}
            refused = f", {totals['refused']} refused" if totals["refused"] else ""
            failed = f", **{totals['fail']} failed**" if totals["fail"] else ""
            line = totals["fail"], totals["pass"], f"{report['device']}: {totals['pass']} passed{refused}{failed}"
            lines[report["device"]] = max(line, lines.get(report["device"], line))
    return [line for *_, line in lines.values()]


def support() -> str:
    """The support matrix in Markdown."""
    known, found = declared(), reports()
    operations = sorted({operation for platform in known.values() for operation in platform})
    lines = ["| operation | " + " | ".join(PLATFORMS) + " |", "|---|" + "---|" * len(PLATFORMS)]
    for operation in operations:
        cells = []
        for platform in PLATFORMS:
            phases = known[platform].get(operation)
            if not phases:
                cells.append("-")
                continue
            backends = "/".join(sorted(set().union(*phases.values())))
            proof = evidence(platform, operation, found) or ["no conformance run recorded"]
            cells.append(f"{' + '.join(sorted(phases, reverse=True))} ({backends})<br>{'<br>'.join(proof)}")
        lines.append(f"| `{operation}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def implemented() -> str:
    """What each platform brings, in Markdown."""
    known = declared()
    lines = ["| platform | devices | forward and backward | forward |", "|---|---|---|---|"]
    for platform in PLATFORMS:
        operations = known[platform]
        backends = sorted({backend for phases in operations.values() for found in phases.values() for backend in found})
        both = sorted(name for name, phases in operations.items() if len(phases) > 1)
        cells = [
            "every operation" if platform == "xla" and names is both else ", ".join(f"`{name}`" for name in names) or "-"
            for names in (both, sorted(operations.keys() - both))
        ]
        lines.append(f"| {platform} | {', '.join(backends)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speed() -> str:
    """Every operation on CPU against the fastest peer, the losses, and the cost of dispatch, in Markdown."""
    recorded = RESULTS / "bench_cpu.json"
    lines = benchmarks(read_document(recorded)) if recorded.exists() else ["No run of `nox -s bench` is recorded yet."]
    startup = json.loads((RESULTS / "startup_cpu.json").read_text())
    overhead = startup["eager_call_us"]
    lines += [
        "",
        f"`import ejkernel` beyond `import jax`: {startup['import_beyond_jax_ms']['median']:.0f} ms. "
        "A warm eager call, over the same function under `jax.jit`: "
        + ", ".join(f"`{name}` {found['overhead_us']:.0f} us" for name, found in overhead.items())
        + ".",
    ]
    return "\n".join(lines)


def benchmarks(document: Document) -> list[str]:
    """The picture, a row for each operation, and every lost case."""
    libraries = ", ".join(f"{name} {document.versions[name]}" for name in ("jax", "python") if name in document.versions)
    settings = f"{document.settings.get('rounds')} rounds, {document.settings.get('clock')} time"
    operations = sorted({case.operation for case in document.cases})
    return [
        f"{document.kind}; {libraries}; {settings}; commit {(document.commit or 'unknown')[:10]}.",
        "",
        "![Time of the best peer over ours, a mark for each case](../../benchmarks/results/bench_cpu.png)",
        "",
        "| operation | cases | forward | backward | compile | temporary memory, ours / peer | lost |",
        "|---|---|---|---|---|---|---|",
        *(_operation_row(name, [case for case in document.cases if case.operation == name]) for name in operations),
        "",
        "Ratios are time of the fastest peer / ours, geometric mean (least to largest).",
        "",
        *_lost(document),
    ]


def _operation_row(name: str, cases: list[Case]) -> str:
    found = [standing(case) for case in cases]
    judged = [one for one in found if one.word != "alone"]
    lost, unresolved = sum(one.word in ("loss", "missing") for one in found), sum(map(_behind, found))
    counted = (f"**{lost} of {len(judged)}**" if lost else f"0 of {len(judged)}") + f", {unresolved} unresolved" * bool(
        unresolved
    )
    pairs = [(case.ours, case.best_peer) for case in cases if case.ours and case.best_peer]
    compile_ratios = [peer.compile_s / ours.compile_s for ours, peer in pairs if ours.compile_s and peer.compile_s]
    cells = [
        f"`{name}`",
        f"{len({case.key[1:3] for case in cases})}",
        _ratios([one.ratio for case, one in zip(cases, found, strict=True) if case.phase == "forward" and one.ratio]),
        _ratios([one.ratio for case, one in zip(cases, found, strict=True) if case.phase != "forward" and one.ratio]),
        _ratios(compile_ratios),
        _memory(pairs),
        counted if judged else "no peer",
    ]
    return f"| {' | '.join(cells)} |"


def _ratios(ratios: list[float]) -> str:
    """Geometric mean (least to largest)."""
    if not ratios:
        return "-"
    mean = statistics.geometric_mean(ratios)
    return f"{mean:.2f}" if len(ratios) == 1 else f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _memory(pairs: list[tuple[Run, Run]]) -> str:
    """Of the case where either needs most."""
    known = [(ours.temporary_bytes, peer.temporary_bytes) for ours, peer in pairs]
    both = [(ours, peer) for ours, peer in known if ours is not None and peer is not None]
    return " / ".join(f"{size / 2**20:.0f} MiB" for size in max(both, key=max)) if both else "-"


def _lost(document: Document) -> list[str]:
    """Cases that a peer runs faster and those that are `_behind`, worst first by the median, and cases without a result of ours."""
    found = [(case, standing(case)) for case in document.cases]
    listed = sorted((pair for pair in found if pair[1].word == "loss" or _behind(pair[1])), key=lambda pair: pair[1].ratio or 0)
    lines = [
        f"- `{case.label}`: {one.ratio:.2f} ({one.interval[0]:.2f} to {one.interval[1]:.2f}) against {one.peer}"
        + (", unresolved" if _behind(one) else "")
        for case, one in listed
        if one.ratio and one.interval
    ]
    lines += [f"- `{case.label}`: no result of ours" for case, one in found if one.word == "missing"]
    compared, unresolved = sum(one.ratio is not None for _, one in found), sum(_behind(one) for _, one in found)
    heading = f"{len(listed) - unresolved} of {compared} cases that a peer runs too are lost"
    heading += f", and {unresolved} more are below {BEHIND} by the median and unresolved" if unresolved else ""
    return [f"{heading}:", "", *lines] if lines else [f"{heading}."]


def _behind(found: Standing) -> bool:
    """Whether a peer is clearly faster by the median, and the interval of the ratio includes 1 all the same."""
    return found.word not in ("loss", "missing") and found.ratio is not None and found.ratio < BEHIND


def cases_on_gpu() -> str:
    """The recorded run on a GPU in Markdown, with what dispatch picks today as ours."""
    return "\n".join(every_case(as_dispatched_now(read_document(RESULTS / "bench_h200.json"))))


def every_case(document: Document) -> list[str]:
    """A row for each case, with what dispatch picks or, if that did not run, the fastest of ours; then the losses."""
    libraries = ", ".join(
        f"{name} {document.versions[name]}" for name in ("jax", "triton", "torch") if name in document.versions
    )
    lines = [
        f"{document.kind}; {libraries}; {document.settings.get('rounds')} rounds, {document.settings.get('clock')} time.",
        "",
        "| case | dtype | phase | ours | time | fraction of the limit | fastest peer | its time / ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in document.cases:
        ours, peer, ratio = case.ours, case.best_peer, case.ratio
        if ours is None and peer is None:
            continue
        name = f"{case.operation} {case.case.removeprefix('bench-')}"
        mine = f"{ours.name} | {1e3 * ours.seconds:.3g} ms | {case.limit_s / ours.seconds:.2f}" if ours else "**none** | - | -"
        theirs = f"{peer.name} | {f'{ratio:.2f}' if ratio else '-'}" if peer else "- | -"
        lines.append(f"| `{name}` | {case.dtype} | {case.phase} | {mine} | {theirs} |")
    return [*lines, "", *_lost(document)]


def compiled_for_tpu() -> str:
    """Kernels compiled for TPUs, then ours beside other libraries' on the benchmark cases, in Markdown."""
    record = json.loads((RESULTS / "tpu_aot.json").read_text())
    own = [row for row in record["rows"] if "peer" not in row]
    lines = [
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()) + ".",
        "",
        "| operation | phase | kind | compiled | refused | failed | most VMEM of a kernel | longest compilation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in own:
        groups.setdefault((row["operation"], row["phase"], row["kind"]), []).append(row)
    for (operation, phase, kind), rows in sorted(groups.items()):
        refused, failed = (sum(word in row for row in rows) for word in ("refused", "failed"))
        vmem = max((kernel["vmem"] for row in rows for kernel in row.get("kernels", {}).values()), default=0)
        counts = f"{len(rows) - refused - failed} | {refused} | {f'**{failed}**' if failed else 0}"
        seconds = max(row.get("seconds", 0) for row in rows)
        lines.append(f"| `{operation}` | {phase} | {kind} | {counts} | {_mib(vmem)} | {seconds:.1f} s |")
    return "\n".join([*lines, "", *_beside_peers(record["rows"])])


def _beside_peers(rows: list[dict[str, Any]]) -> list[str]:
    """A row for every library on every benchmark case and kind for which ours and a peer's were compiled."""
    ours, theirs = ({_place(row) for row in rows if ("peer" in row) == is_peer} for is_peer in (False, True))
    places = ours & theirs
    lines = [
        "| case | phase | kind | whose | VMEM | spilled registers | bundles | temporary memory | XLA's estimate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted((row for row in rows if _place(row) in places), key=lambda row: (*_place(row), row.get("peer", ""))):
        operation, case, phase, kind, _ = _place(row)
        name = f"| `{operation} {case.removeprefix('bench-')}` | {phase} | {kind} | {row.get('peer', '**ours**')}"
        if reason := row.get("failed") or row.get("refused"):
            lines.append(f"{name} | does not compile: {reason.partition(chr(10))[0][:60]} | - | - | - | - |")
            continue
        kernels = row.get("kernels", {}).values()
        most = {key: max((kernel[key] for kernel in kernels), default=0) for key in ("vmem", "spilled")}
        bundles = sum(kernel["bundles"] for kernel in kernels)
        listed = f"{_mib(most['vmem'])} | {_mib(most['spilled'])} | {bundles}" if kernels else "- | - | -"
        estimate = f"{1e3 * row['optimal_seconds']:.3g} ms" if "optimal_seconds" in row else "-"
        lines.append(f"{name} | {listed} | {_mib(row.get('temporary', 0))} | {estimate} |")
    return lines


def _place(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("operation", "case", "phase", "kind", "dtype"))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def versions() -> str:
    """The pairs of Python and jax that are tested, and what each distribution needs, in Markdown."""
    text = (ROOT / "noxfile.py").read_text()
    pairs = next(
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAIRS"
    )
    lines = ["| Python | jax |", "|---|---|", *(f"| {python} | {jax} |" for python, jax in pairs), ""]
    lines += ["| distribution | needs | extras |", "|---|---|---|"]
    for name in ("core", *PLATFORMS):
        project = tomllib.loads((ROOT / f"ejkernel-{name}" / "pyproject.toml").read_text())["project"]
        needs = ", ".join(f"`{need}`" for need in project["dependencies"])
        extras = ", ".join(f"`{extra}`" for extra in project.get("optional-dependencies", {})) or "-"
        lines.append(f"| `{project['name']}` | {needs} | {extras} |")
    return "\n".join(lines)


def variables() -> str:
    """Every environment variable, in Markdown."""
    lines = ["| variable | meaning | default |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f'| <a id="{one.name.lower()}"></a>`{one.name}` | {one.meaning} | {one.default} |' for one in VARIABLES)]
    )


def losses() -> str:
    """Cases that a peer runs faster by the median, from every recorded benchmark, in Markdown."""
    return "\n".join(lost_cases([(path.name, read_document(path)) for path in sorted(RESULTS.glob("bench_*.json"))]))


def lost_cases(documents: Sequence[tuple[str, Document]]) -> list[str]:
    """For each kind of device how many are lost, and a row for each with the fastest peer, worst first.

    A case is listed if the peer's median is the shorter one; where the interval of the ratio includes 1 it is unresolved, and says
    so. Of records of one case beside one peer the newest counts.
    """
    lines: list[str] = []
    for kind, worst in newest(documents).items():
        behind = [one for one in worst if one.standing.ratio and one.standing.ratio < 1]
        lost = sum(one.standing.word == "loss" for one in behind)
        unresolved = len(behind) - lost
        counted = f"{lost} of {len(worst)} cases that a peer runs too are lost"
        lines += [
            "",
            f"## {kind}",
            "",
            f"{counted}, and {unresolved} more {'is' if unresolved == 1 else 'are'} behind and unresolved.",
            "",
        ]
        if behind:
            head = ("case", "dtype", "phase", "ours", "its time / ours", "faster", "record", "made")
            lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [_lost_row(one) for one in behind]
    return lines[1:]


def wide_recurrences() -> str:
    found = json.loads((RESULTS / "recurrences_float32_h200.json").read_text())["milliseconds"]
    rows = ["| recurrence | dtype | ours | XLA | XLA / ours |", "|---|---|---|---|---|"]
    for dtype, times in found.items():
        for name, ours in ((name, time) for name, time in times.items() if name.endswith(" triton")):
            family = name.removesuffix(" triton")
            rows.append(
                f"| {family} | {dtype} | {ours:.2f} | {times[f'{family} xla']:.2f} | {times[f'{family} xla'] / ours:.1f} |"
            )
    return "\n".join(rows)


def grid_of_shapes() -> str:
    """The times of every record of tests/device/orders.py, by operation, phase and kind of shape."""
    rows = default_order.kept_rows(RESULTS)
    lost = sum(row.lost for row in rows)
    return "\n".join(["```text", f"The default lost {lost} of {len(rows)} calls.", "", *default_order.orders(rows), "```"])


def explained() -> str:
    """What `explain` prints for a device that need not be there, with the plugins that need no library, in Markdown."""
    program = (
        "import ejkernel, jax, jax.numpy as jnp\n"
        "query = key = value = jax.ShapeDtypeStruct((1, 2048, 8, 64), jnp.bfloat16)\n"
        "with ejkernel.use(target='gpu:8.0'):\n"
        "    print(ejkernel.explain('flash_attention', query, key, value, causal=True).forward)"
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = {"EJKERNEL_PLUGINS": "xla,triton,pallas", "EJKERNEL_CACHE_DIR": folder, "JAX_PLATFORMS": "cpu"}
        found = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")} | settings
        run = subprocess.run([sys.executable, "-c", program], env=found, capture_output=True, text=True, check=True)
    told = "\n".join(line for line in run.stdout.splitlines() if "EJKERNEL_PLUGINS does not name it" not in line)
    return f"```text\n{told}\n```"


def _lost_row(one: Compared) -> str:
    case, found = one.case, one.standing
    assert case.ours and found.ratio and found.interval
    low, high = found.interval
    label = f"`{case.operation} {case.case.removeprefix('bench-')}` | {case.dtype} | {case.phase} | {case.ours.name}"
    ratio = f"{found.ratio:.2f} ({low:.2f} to {high:.2f})" + ("" if found.word == "loss" else ", unresolved")
    return f"| {label} | {ratio} | {found.peer} | `{one.record}` | {one.made} |"


PAGES = {
    "README.md": {"training": training_tables.training, "hardware": hardware_table.summary, "explained": explained},
    "docs/index.md": {
        "training": training_tables.training_in_short,
        "explained": explained,
        "hardware": hardware_table.hardware,
        "marks": hardware_table.legend,
    },
    "docs/support.md": {"platforms": implemented, "support": support},
    "docs/environment.md": {"variables": variables},
    "docs/evidence/losses.md": {"losses": losses},
    "docs/evidence/default_order.md": {"grid of shapes": grid_of_shapes},
    "docs/install.md": {"versions": versions},
    "docs/tutorials/train_a_model.md": {"several devices": training_tables.scaling},
    "docs/evidence/benchmarks_cpu.md": {"speed": speed},
    "docs/evidence/benchmarks_h200.md": {"cases on a GPU": cases_on_gpu},
    "docs/evidence/triton.md": {"wide recurrences": wide_recurrences},
    "docs/evidence/pallas_tpu.md": {"kernels compiled for TPU": compiled_for_tpu},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    outdated = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = page.relative_to(ROOT).as_posix()
        text = fresh = page.read_text()
        for title, table in PAGES.get(name, {}).items():
            begin, end = f"<!-- {title}: generated by tools/generated_tables.py -->", f"<!-- end of {title} -->"
            head, _, rest = fresh.partition(begin)
            fresh = f"{head}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
        fresh = filled(fresh)
        if fresh != text:
            outdated.append(name)
            if not check:
                page.write_text(fresh)
    if check and outdated:
        print(f"{', '.join(outdated)}: tables are out of date; run python tools/generated_tables.py", file=sys.stderr)
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())

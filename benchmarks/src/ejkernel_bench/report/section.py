"""A section of a documentation site: a page of Markdown for each operation, from everything that was recorded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from ejkernel_bench._document import Case, Document, read_document
from ejkernel_bench._history import Recorded, current, newest
from ejkernel_bench._standing import standing
from ejkernel_bench._units import seconds_text
from ejkernel_bench.report._rows import Look, chart, legend, looks, short, verdict

RECORDS = "records"
_OUTPUT = re.compile(r" --(?:out|plots) \S+")


def write_section(records: Sequence[str | Path], folder: str | Path) -> dict[str, str]:
    """Write `<operation>.md` for each operation and a copy of each record; returns a line of Markdown for each operation.

    Args:
        records: files that `ejkernel bench --out` wrote.
        folder: where the pages go; made if it is not there.

    Raises:
        ValueError: a file is not such a record.
    """
    folder = Path(folder)
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    documents = [(Path(path).name, read_document(path)) for path in records]
    for path in records:
        shutil.copyfile(path, folder / RECORDS / Path(path).name)
    kinds, lost = current(documents), _lost(documents)
    operations = sorted({row.case.operation for rows in kinds.values() for row in rows})
    for operation in operations:
        own = {kind: [row for row in rows if row.case.operation == operation] for kind, rows in kinds.items()}
        page = operation_page(operation, {kind: rows for kind, rows in own.items() if rows}, lost.get(operation, (0, 0)))
        (folder / f"{operation}.md").write_text(page, encoding="utf-8")
    return {
        operation: _counted(*lost.get(operation, (0, 0)))
        for operation in sorted(operations, key=lambda one: -lost.get(one, (0,))[0])
    }


def operation_page(operation: str, kinds: Mapping[str, Sequence[Recorded]], lost: tuple[int, int]) -> str:
    """Charts and tables of an operation, a section for each device, dtype and phase."""
    styles = looks([row.case for rows in kinds.values() for row in rows])
    parts = [
        "---\nhide:\n  - toc\n---",
        f"# Measurements: {operation}",
        f"{_counted(*lost)} Above 1 ours is faster.",
        legend(styles),
    ]
    on_cpu = {kind: rows[0].document.device.get("backend") == "cpu" for kind, rows in kinds.items()}
    for kind, rows in sorted(kinds.items(), key=lambda pair: (on_cpu[pair[0]], pair[0])):
        parts.append(f"## {kind}")
        for (dtype, phase), some in groupby(rows, key=lambda row: (row.case.dtype, row.case.phase)):
            parts.append(_measurement(kind, dtype, phase, list(some), styles))
        parts.append(_repeated(operation, rows))
    return "\n\n".join(parts) + "\n"


def _measurement(kind: str, dtype: str, phase: str, rows: Sequence[Recorded], styles: Mapping[str, Look]) -> str:
    """A chart with its numbers, as one block of HTML, which a script can hide."""
    heads = ("case", "ours", "time", "of the limit", "fastest peer", "its time / ours", "record")
    lines = "".join(_line(row) for row in rows)
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<section class="measurement" data-device="{escape(kind)}" data-dtype="{escape(dtype)}" data-phase="{escape(phase)}">'
        f'<p class="bench-title">{escape(dtype)}, {escape(phase)}</p>{chart(rows, styles)}'
        f'<details><summary>Numbers</summary><div class="bench-scroll"><table class="bench-table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div></details></section>"
    )


def _line(row: Recorded) -> str:
    case, found = row.case, standing(row.case)
    ours, peer = case.ours, case.best_peer
    cells = [
        f"<code>{escape(short(case))}</code>",
        escape(ours.name) if ours else "none",
        seconds_text(ours.seconds) if ours else "-",
        _fraction(case),
        escape(peer.name) if peer else "-",
        f"{verdict(found)} ({found.interval[0]:.2f} to {found.interval[1]:.2f})" if found.interval else verdict(found),
        f'<a href="{RECORDS}/{escape(row.record)}">{escape(row.record)}</a>',
    ]
    lost = ' class="bench-loss"' if found.word == "loss" else ""
    return f"<tr{lost}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _fraction(case: Case) -> str:
    return f"{case.limit_s / case.ours.seconds:.2f}" if case.ours and case.limit_s > 0 else "-"


def _repeated(operation: str, rows: Sequence[Recorded]) -> str:
    """The records of a device, each with the command that makes it again."""
    found = {row.record: row.document for row in rows}
    entries: list[str] = []
    for name, document in sorted(found.items(), key=lambda pair: pair[1].date, reverse=True):
        versions = (f"{one} {document.versions[one]}" for one in ("jax", "triton", "torch") if one in document.versions)
        where = (document.date[:10], *([f"commit {document.commit[:10]}"] if document.commit else []), *versions)
        entries.append(f"[{name}]({RECORDS}/{name}), {', '.join(where)}:")
        entries.append("\n".join(("```bash", *commands(document, operation), "```")))
    return "\n\n".join(entries)


def commands(document: Document, operation: str) -> list[str]:
    """What was run of an operation, without where its files went."""
    every = [_OUTPUT.sub("", one.strip()) for one in document.command.split(";")]
    return [one for one in every if not _operations(one) or operation in _operations(one)] or every


def _operations(command: str) -> list[str]:
    """The operations that a command names; none if it takes all."""
    words = command.partition("ejkernel bench")[2].split()
    return words[: next((place for place, word in enumerate(words) if word.startswith("-")), len(words))]


def _lost(documents: Sequence[tuple[str, Document]]) -> dict[str, tuple[int, int]]:
    """Operation -> how many cases are lost, of how many that a peer ran too."""
    found: dict[str, list[bool]] = {}
    for cases in newest(documents).values():
        for one in cases:
            found.setdefault(one.case.operation, []).append(one.standing.word == "loss")
    return {operation: (sum(losses), len(losses)) for operation, losses in found.items()}


def _counted(lost: int, compared: int) -> str:
    if not compared:
        return "No other library ran a case of it."
    losses = f"{lost} {'loss' if lost == 1 else 'losses'}"
    return f"{losses} in {compared} {'case' if compared == 1 else 'cases'} that another library ran too."

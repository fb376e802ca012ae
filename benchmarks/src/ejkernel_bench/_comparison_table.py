"""The comparison as a rich table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ejkernel_bench._judgement import WORSE, Change
from ejkernel_bench._units import seconds_text


def comparison_table(changes: Sequence[Change]) -> Any:
    """One row for each change, in the order given."""
    from rich.text import Text

    from ejkernel.cli.output import table

    styles = {**dict.fromkeys(WORSE, "bold red"), "unclear": "yellow", "faster": "green", "fixed": "green"}
    rows = [
        (
            Text(change.verdict, style=styles.get(change.verdict, "") if change.kind == "ours" else "dim"),
            f"{change.operation} {change.case} {change.dtype} {change.phase}",
            change.run + (" (peer)" if change.kind == "peer" else ""),
            f"{seconds_text(change.old_s) or '-'} -> {seconds_text(change.new_s) or '-'}",
            _ratio(change),
            change.note,
        )
        for change in changes
    ]
    wrap = ("case", "time", "now / before", "note")
    return table(("verdict", "case", "run", "time", "now / before", "note"), rows, wrap=wrap)


def _ratio(change: Change) -> str:
    if change.ratio is None or change.interval is None:
        return ""
    return f"{change.ratio:.2f} ({change.interval[0]:.2f} to {change.interval[1]:.2f})"

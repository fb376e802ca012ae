"""Draw docs/front: every recorded case on a Hopper GPU beside the fastest peer, and the logo; each on light and on dark.

python tools/draw_peers.py            write the pictures
python tools/draw_peers.py --check    exit 1 if one is out of date
"""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pictures import write_or_check

from ejkernel_bench._document import read_document
from ejkernel_bench._history import Compared, newest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "front"
DEVICES = ("H100", "H200")
"""Words for the cards of this generation in a device's name."""

COLOURS = {
    "": {"text": "#1b1f24", "soft": "#59636e", "line": "#d0d7de", "win": "#0072b2", "loss": "#c2410c", "shade": "#fdeee6"},
    "_dark": {"text": "#e6eaef", "soft": "#9aa5b1", "line": "#3d4650", "win": "#4db2f0", "loss": "#ff8a5c", "shade": "#35211a"},
}
"""End of a picture's name -> its colours."""

WIDTH, LEFT, RIGHT, TOP, ROW = 440, 172, 376, 64, 26
TICKS = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def on_hopper() -> list[Compared]:
    """Every case on one of the devices that a peer ran too."""
    documents = [(path.name, read_document(path)) for path in sorted(RESULTS.glob("bench_*.json"))]
    return [one for kind, found in newest(documents).items() if any(name in kind for name in DEVICES) for one in found]


def picture(cases: Sequence[Compared], colours: Mapping[str, str]) -> str:
    """A row for each operation, the one with the worst case first, and a mark for each case: left of 1 the peer is faster."""
    rows: dict[str, list[Compared]] = {}
    for one in sorted(cases, key=ratio):
        rows.setdefault(one.case.operation, []).append(one)
    low, high = min(0.45, ratio(min(cases, key=ratio)) / 1.1), max(5.5, ratio(max(cases, key=ratio)) * 1.1)

    def at(value: float) -> float:
        return LEFT + (math.log(value / low)) / math.log(high / low) * (RIGHT - LEFT)

    bottom = TOP + ROW * len(rows)
    height = bottom + 48
    lost = sum(one.standing.word == "loss" for one in cases)
    parts = [
        f'<rect x="{LEFT}" y="{TOP - 4}" width="{at(1) - LEFT:.1f}" height="{bottom - TOP + 4}" fill="{colours["shade"]}"/>',
        words(8, 18, "Time of the fastest peer / ours", colours["text"], size=15, weight=600),
        words(at(1) - 5, TOP - 26, "slower", colours["loss"], end=True),
        words(at(1) + 5, TOP - 26, "faster", colours["win"]),
        words(WIDTH - 6, TOP - 26, "lost", colours["soft"], end=True),
    ]
    for tick in (tick for tick in TICKS if low <= tick <= high):
        strong = colours["soft"] if tick == 1 else colours["line"]
        parts.append(f'<path d="M{at(tick):.1f} {TOP - 4}V{bottom}" stroke="{strong}"/>')
        parts.append(words(at(tick), TOP - 9, f"{tick:g}", colours["soft"], size=11.5, middle=True))
    for index, (operation, found) in enumerate(rows.items()):
        middle = TOP + ROW * index + ROW / 2
        losses = sum(one.standing.word == "loss" for one in found)
        parts.append(words(8, middle + 4.5, operation, colours["text"]))
        parts.append(
            words(WIDTH - 6, middle + 4.5, f"{losses} of {len(found)}", colours["loss" if losses else "soft"], end=True)
        )
        step = min(3.0, 14 / max(1, len(found) - 1))
        parts += [
            mark(one, at(ratio(one)), middle + step * (place - (len(found) - 1) / 2), colours)
            for place, one in enumerate(found)
        ]
    key = bottom + 24
    shapes = (("forward", "forward"), ("backward", "with gradients"))
    parts += [shape(phase, 14 + 84 * place, key - 4, f'fill="{colours["soft"]}"') for place, (phase, _) in enumerate(shapes)]
    parts += [words(24 + 84 * place, key, text, colours["soft"], size=12) for place, (_, text) in enumerate(shapes)]
    parts.append(shape("forward", 220, key - 4, f'fill="none" stroke="{colours["soft"]}" stroke-width="1.5"'))
    parts.append(words(230, key, "the samples cannot tell", colours["soft"], size=12))
    about = f"{lost} of {len(cases)} cases lost; NVIDIA {' and '.join(DEVICES)}, records to {max(one.made for one in cases)}"
    parts.append(words(8, key + 18, about, colours["soft"], size=12))
    label = f"Time of the fastest peer over ours by operation. {about}."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{label}" font-family="{FONT}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def ratio(one: Compared) -> float:
    assert one.standing.ratio is not None
    return one.standing.ratio


def mark(one: Compared, x: float, y: float, colours: Mapping[str, str]) -> str:
    """A case: filled where the interval decides, hollow where not."""
    colour = colours["loss" if ratio(one) < 1 else "win"]
    look = f'fill="none" stroke="{colour}" stroke-width="1.5"' if one.standing.word == "even" else f'fill="{colour}"'
    low, high = one.standing.interval or (0, 0)
    case = one.case
    about = f"{case.case.removeprefix('bench-')}, {case.dtype}, {case.phase}: {ratio(one):.2f} ({low:.2f} to {high:.2f})"
    return shape(case.phase, x, y, look, f"{about} against {one.standing.peer}, {one.record}")


def shape(phase: str, x: float, y: float, look: str, title: str = "") -> str:
    path = (
        f"M{x - 4:.1f} {y + 3.2:.1f}h8l-4 -7.2z" if phase != "forward" else f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0"
    )
    return f'<path d="{path}" {look}><title>{html.escape(title)}</title></path>' if title else f'<path d="{path}" {look}/>'


def words(
    x: float, y: float, text: str, colour: str, *, size: float = 13, weight: int = 400, end: bool = False, middle: bool = False
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    heavy = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{heavy}{anchor}>{text}</text>'


def logo(colours: Mapping[str, str]) -> str:
    """A causal mask of three tiles by three; of the six that are computed one stands out."""
    tiles = []
    for row in range(3):
        for column in range(3):
            colour, faint = colours["win"], ""
            if column > row:
                faint = ' opacity=".25"'
            elif (row, column) == (1, 1):
                colour = colours["loss"]
            tiles.append(
                f'<rect x="{4 + 20 * column}" y="{4 + 20 * row}" width="16" height="16" rx="3.5" fill="{colour}"{faint}/>'
            )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" width="64" height="64">\n'
        + "\n".join(tiles)
        + "\n</svg>\n"
    )


def pictures() -> dict[str, str]:
    """Name of a file -> its text."""
    cases = on_hopper()
    found: dict[str, str] = {}
    for end, colours in COLOURS.items():
        found[f"peers{end}.svg"] = picture(cases, colours)
        found[f"logo{end}.svg"] = logo(colours)
    return found


def main() -> int:
    return write_or_check(FOLDER, pictures(), "tools/draw_peers.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())

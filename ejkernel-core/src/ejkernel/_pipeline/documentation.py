"""What the docstrings of all public functions have in common, which stands here once.

`public` adds it to `__doc__` at run time, and tools/site_docstrings.py to what the site's static reader finds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Sequence

ARGUMENTS = {
    "platform": 'None or "auto", one platform, or several in order of preference.',
    "cfg": "config override for the chosen implementation.",
}
"""Arguments that a docstring describes itself only where there is more to say of them."""

ERRORS = {
    "ValueError": "shapes, values or settings that do not fit or contradict each other.",
    "TypeError": "a wrong type or dtype.",
    "NoKernelError": "no admitted platform supports the call.",
}
"""The same of what a function that takes platforms raises."""

_NAME = re.compile(r"\w+")
_HEAD = re.compile(r"^    (\w[^:`]*):", re.MULTILINE)
"""Names, with commas between them, at the beginning of an entry."""


def completed(docstring: str, parameters: Sequence[str]) -> str:
    """A docstring with the common entries that it lacks; one without a section of arguments refers to another and stays.

    Args:
        docstring: as it stands in the source.
        parameters: the function's, in order. Without a platform among them, it raises what its docstring says.
    """
    lines = inspect.cleandoc(docstring).splitlines()
    if "Args:" not in lines:
        return docstring
    start, end = _section(lines, "Args:")
    known = _described(lines[start:end])
    for name in reversed([name for name in ARGUMENTS if name in parameters and name not in known]):
        later = known.intersection(parameters[parameters.index(name) + 1 :])
        place = next((i for i in range(start + 1, end) if later & _described(lines[i : i + 1])), end) if later else end
        lines.insert(place, f"    {name}: {ARGUMENTS[name]}")
        known, end = known | {name}, end + 1
    if "platform" not in parameters:
        return "\n".join(lines)
    if "Raises:" not in lines:
        _, end = _section(lines, "Returns:" if "Returns:" in lines else "Args:")
        lines[end:end] = ["", "Raises:"]
    start, end = _section(lines, "Raises:")
    known = _described(lines[start:end])
    lacking = {name: f"    {name}: {when}" for name, when in ERRORS.items() if name not in known}
    first = [lacking.pop("ValueError")] if "ValueError" in lacking else []
    lines[start + 1 : end] = [*first, *lines[start + 1 : end], *lacking.values()]
    return "\n".join(lines)


def _section(lines: list[str], title: str) -> tuple[int, int]:
    """The line of a title, and the one after the last of its section."""
    start = lines.index(title)
    end = next((i for i in range(start + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    while not lines[end - 1]:
        end -= 1
    return start, end


def _described(lines: Collection[str]) -> set[str]:
    """Names that have an entry in these lines."""
    return {name for head in _HEAD.findall("\n".join(lines)) for name in _NAME.findall(head)}

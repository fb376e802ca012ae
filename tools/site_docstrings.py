"""For the site: what docstrings have in common is added, as at run time, examples in them become code and papers links."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from griffe import Extension, Function, Object

from ejkernel._pipeline.documentation import completed

sys.path.insert(0, str(Path(__file__).parent))

from site_papers import linked

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
"""A prompt and the lines up to the next empty one."""


class Docstrings(Extension):
    """Common entries in those of `@public` functions, and fences around what begins with a prompt."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if isinstance(obj, Function) and any(str(decorator.value).startswith("public(") for decorator in obj.decorators):
            text = completed(text, [parameter.name for parameter in obj.parameters])
        obj.docstring.value = EXAMPLE.sub(fenced, linked(text))


def fenced(match: re.Match[str]) -> str:
    indent = match[1]
    return f"{indent}```pycon\n{match[0]}\n{indent}```"

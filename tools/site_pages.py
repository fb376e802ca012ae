"""What a page of the repository becomes on the site, beyond its links: pictures for two schemes, identifiers in one piece."""

from __future__ import annotations

import re

PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)"><img ([^>]*?)src="([^"]+)"([^>]*)></picture>'
)
"""As GitHub takes it: by the system's setting, which the switch of the site does not change."""

CODE = re.compile(r"(?<!`)`([^`|\n]+)`(?!`)(?!\{)")
MARK = re.compile(r"<!--(?:[a-z]\w*|/)-->")
DATE = re.compile(r"(?<![\w-])\d{4}-\d\d-\d\d(?![\w-])")
WHOLE = 44
"""Characters of code that a cell of a table never breaks; longer ones are calls, which break at their spaces."""

WIDE = 8
"""Columns from which on a page leaves its table of contents out, for their sake."""


def both_schemes(text: str) -> str:
    """Pictures for a light and a dark page as two images, of which the theme shows one."""

    def images(found: re.Match[str]) -> str:
        dark, before, light, after = found.groups()
        return "".join(
            f'<img {before}src="{source}#only-{scheme}"{after}>' for scheme, source in (("light", light), ("dark", dark))
        )

    return PICTURE.sub(images, text)


def without_marks(text: str) -> str:
    """Measured values without the comments around them, which at the beginning of a line would end a paragraph."""
    return MARK.sub("", text)


def whole_identifiers(text: str) -> str:
    """Short code and dates in tables are marked, so that they are not broken."""

    def marked(found: re.Match[str]) -> str:
        return found[0] if len(found[1]) > WHOLE else f"{found[0]}{{ .whole }}"

    def row(line: str) -> str:
        return DATE.sub(r'<span class="whole">\g<0></span>', CODE.sub(marked, line))

    return "\n".join(row(line) if line.startswith("|") else line for line in text.split("\n"))


def columns(text: str) -> int:
    """Of the widest table."""
    return max((line.count("|") - 1 for line in text.split("\n") if re.match(r"\|[-:|\s]+\|$", line)), default=0)


def front_matter(text: str) -> str:
    """What the theme is told of a page, before its text."""
    return "---\nhide:\n  - toc\n---\n\n" if columns(text) >= WIDE else ""

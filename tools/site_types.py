"""A page of the reference for the names in `ejkernel.typing`: what `Queries` in a signature means."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "ejkernel-core" / "src" / "ejkernel" / "typing.py"
MODULE = "ejkernel.typing"

DTYPES = {
    "Float": "float",
    "Float32": "float32",
    "Float64": "float64",
    "Int32": "int32",
    "UInt32": "uint32",
    "Integer": "integer",
    "Bool": "bool",
    "Num": "number",
    "Shaped": "any dtype",
    "Key": "PRNG key",
}
"""Jaxtyping's word -> what stands before the axes."""

LETTERS = {
    "batch": "B",
    "length": "T",
    "queries": "T",
    "keys": "S",
    "heads": "H",
    "kv_heads": "K",
    "size": "D",
    "value_size": "V",
}
"""Axis -> its letter in the docstrings."""

HEAD = f"""# Types

What the names in signatures mean. They are in `{MODULE}`. A shape names its axes, and in one signature an axis has one size
wherever its name stands. `*batch` is any number of axes, `#heads` an axis that may be 1 instead, `_` and `...` axes of any size.
Arrays may be of JAX, traced or not, or of NumPy. With `EJKERNEL_TYPECHECK=1` every call is checked against them.
"""


def types_page() -> str:
    """A table for each part of the module, an anchor at each name."""
    text = SOURCE.read_text()
    lines, parts = text.splitlines(), [HEAD]
    statements = ast.parse(text).body
    known = {name for one in statements if (name := _name(one))}
    title, rows, last = "", list[tuple[str, str, str]](), 0
    for place, one in enumerate(statements):
        name = _name(one)
        if name is None:
            continue
        for comment in (line for line in lines[last : one.lineno - 1] if line.startswith("# ")):
            parts += _table(title, rows)
            title, rows = comment.removeprefix("# "), []
        last = one.lineno
        anchored = f"[](){{ #{MODULE}.{name} }}`{name}`{{ .whole }}"
        rows.append((anchored, _meaning(one, known), _about(statements, place)))
    return "\n\n".join([*parts, *_table(title, rows)]) + "\n"


def _name(statement: ast.stmt) -> str | None:
    """What it defines, if it is a type."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return statement.name if isinstance(statement, ast.ClassDef) else None


def _table(title: str, rows: list[tuple[str, str, str]]) -> list[str]:
    """A heading and its table; without the last column where none has a remark."""
    width = 3 if any(about for *_, about in rows) else 2
    cells = [("type", "is", "about"), ("---", "---", "---"), *rows]
    return [f"## {title}", "\n".join(f"| {' | '.join(row[:width])} |" for row in cells)] if rows else []


def _about(statements: list[ast.stmt], place: int) -> str:
    one = statements[place]
    if isinstance(one, ast.ClassDef):
        return " ".join((ast.get_docstring(one) or "").split("\n\n")[0].split())
    follows = statements[place + 1] if place + 1 < len(statements) else None
    if isinstance(follows, ast.Expr) and isinstance(follows.value, ast.Constant) and isinstance(follows.value.value, str):
        return " ".join(follows.value.value.split()).replace("|", "\\|")
    return ""


def _meaning(statement: ast.stmt, known: set[str]) -> str:
    return "a protocol" if isinstance(statement, ast.ClassDef) else meaning(statement.value, known)  # pyright: ignore[reportAttributeAccessIssue]


def meaning(expression: ast.expr, known: set[str]) -> str:
    """A type in words: `float` and its axes, words of a Literal, other names as links."""
    match expression:
        case ast.BinOp(left=left, right=right):
            parts = [meaning(left, known), meaning(right, known)]
            return " or ".join(dict.fromkeys(part for part in parts if not part.startswith("float64")))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=words):
            return ", ".join(f"`{ast.unparse(word)}`" for word in (words.elts if isinstance(words, ast.Tuple) else [words]))
        case ast.Subscript(value=ast.Name(id=dtype), slice=ast.Tuple(elts=[_, ast.Constant(value=str(axes))])) if (
            dtype in DTYPES
        ):
            return f"{DTYPES[dtype]} {shape(axes)}"
        case ast.Subscript(value=ast.Name(id=outer), slice=inner) if outer in ("tuple", "list", "Sequence", "Mapping"):
            elements = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return f"{outer} of ({', '.join(meaning(one, known) for one in elements)})"
        case ast.Name(id=name) if name in known:
            return f"[`{name}`][{MODULE}.{name}]"
        case _:
            return f"`{ast.unparse(expression).removeprefix('_')}`"


def shape(axes: str) -> str:
    """Axes as docstrings write them where each has a letter there, and by their names."""
    names = axes.split()
    if not names:
        return "scalar"
    named = f"`[{', '.join(names)}]`"
    bare = [re.sub(r"^[*#]", "", name) for name in names]
    if any(name not in LETTERS for name in bare):
        return named
    letters = (name.replace(plain, LETTERS[plain]) for name, plain in zip(names, bare, strict=True))
    return f"`[{', '.join(letters)}]`, that is {named}"

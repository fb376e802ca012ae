"""Build the documentation site: the pages under docs/, CONTRIBUTING, CHANGELOG and SECURITY, and a reference made from docstrings.

python tools/build_site.py    writes build/site/html; anything that zensical warns of is an error

Links to files of the repository that are no pages become their names: a reader of the site may not have the repository.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ejkernel
from ejkernel._plugins.catalog import FACADES
from ejkernel_bench.report import write_section

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import site_papers  # noqa: E402 - beside this file, also where a test loads it
import site_search  # noqa: E402
import site_types  # noqa: E402
from site_pages import both_schemes, front_matter, whole_identifiers, without_marks  # noqa: E402 - beside this file, also where a test loads it

DOCS = ROOT / "docs"
SETTINGS = ROOT / "mkdocs.yml"
OUT = ROOT / "build" / "site"
BESIDE = {"README.md": "overview.md", **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}}
"""Pages of the repository that are pages of the site too, and their names there: a README would be taken for the home page."""

SOURCE = re.compile(r'(?<=[ "])(src|srcset)="([^":]+)"')
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A page of the reference.

    Attributes:
        title: its heading.
        about: a sentence under the heading.
        homes: modules of `ejkernel.modules` whose public functions it lists, with their class APIs.
        names: further public objects, as users write them.
        modules: public modules that it lists in full, by their `__all__`.
    """

    title: str
    about: str
    homes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


REFERENCES = {
    "attention": Reference(
        "Attention",
        "Dense, packed, sparse, latent and ring attention.",
        homes=("dense_attention", "dot_product", "block_sparse", "sparse_attention", "sparse_latent", "latent", "ring"),
        names=("ejkernel.block_sparse_layout", "ejkernel.BlockSparseLayout"),
    ),
    "serving": Reference(
        "Serving",
        "Attention over paged caches, their updates, and sampling.",
        homes=("serving", "serving_pages", "serving_decode", "serving_updates", "latent_serving", "sampling"),
    ),
    "recurrences": Reference(
        "Recurrences",
        "Linear attention, delta rules, RWKV, Mamba, xLSTM, short convolutions.",
        homes=(
            "recurrences",
            "constant_decays",
            "deltas",
            "delta_products",
            "xlstm",
            "convolutions",
            "states",
            "mamba",
            "split_sequences",
        ),
    ),
    "rows": Reference(
        "Norms, softmax, rotary embedding, pooling",
        "Functions over rows.",
        homes=("norms", "probabilities", "rotary", "rotary_embedding", "pooling", "gates"),
        names=("ejkernel.LlamaRotaryEmbedding",),
    ),
    "products": Reference(
        "Matrix products, losses, quantization",
        "Grouped, quantized and collective products; mixtures of experts; losses; packed weights.",
        homes=("matmuls", "mixture_of_experts", "collectives", "losses", "divergences"),
        names=(
            "ejkernel.MoeRouteOutput",
            "ejkernel.MoePermuteOutput",
            "ejkernel.moe_load_balancing_loss",
            "ejkernel.moe_z_loss",
            "ejkernel.CrossEntropyOutput",
            "ejkernel.KLDivergenceOutput",
            "ejkernel.QuantizedFloat8",
        ),
        modules=("ejkernel.quantization",),
    ),
    "masks": Reference(
        "Masks and packing",
        "What a query sees, and packed sequences. `ejkernel.xla_utils` has the names of `ejkernel.packing` too.",
        names=("ejkernel.MaskInfo",),
        modules=("ejkernel.packing",),
    ),
    "dispatch": Reference(
        "Dispatch and errors",
        "Which implementation runs, why, and what is raised where none can.",
        names=(
            *(
                f"ejkernel.{name}"
                for name in ("use", "explain", "kernel_registry", "Platform", "Backend", "EXPORT_DISABLED_CHECKS")
            ),
            *(f"ejkernel.call.decision.{name}" for name in ("Explanation", "Decision", "Verdict")),
            *(f"ejkernel.errors.{name}" for name in ("EjkernelWarning", "PluginWarning", "FallbackWarning", "CacheWarning")),
            *(
                f"ejkernel.{name}"
                for name in ("EjkernelError", "NoKernelError", "NoConfigError", "NoTunerError", "PluginError", "TracingError")
            ),
            "ejkernel.AnnotationError",
        ),
    ),
    "tuning": Reference(
        "Configs and tuning",
        "Which config an implementation runs with. `ejkernel.tuning` has what the tuner records; `ejkernel.ops` selects by hand.",
        names=("ejkernel.autotune", "ejkernel.overlay", "ejkernel.Executor", "ejkernel.create_default_executor"),
        modules=("ejkernel.modules.operations.configs", "ejkernel.tuning", "ejkernel.ops"),
    ),
    "plugins": Reference(
        "Plugins",
        "What a plugin imports, and what its kernels read of a call.",
        modules=("ejkernel.plugin", "ejkernel.targets", "ejkernel.call"),
    ),
    "helpers": Reference(
        "Helpers",
        "Calling compiled code, sizes, inputs for tests.",
        modules=("ejkernel.callib", "ejkernel.utils"),
    ),
}
"""File below `reference/` -> page."""

ELSEWHERE = {
    "ejkernel.attention": "ejkernel.modules.dense_attention.attention",
    "ejkernel.kernel_registry": "ejkernel._plugins.registry.KernelRegistry",
}
"""Names that a static reader takes for something else (a module, a bare value), and where the docstrings are."""


def class_apis(home: str) -> list[str]:
    """Public classes of a module that call a function."""
    return [name for name in _names(home) if hasattr(getattr(ejkernel, name), "function")]


def functions(home: str) -> list[str]:
    """Public functions of a module of `ejkernel.modules`."""
    return [name for name in _names(home) if name not in class_apis(home)]


def _names(home: str) -> list[str]:
    """Public names that a module defines itself."""
    module = f"ejkernel.modules.{home}"
    named = (name for name, where in FACADES.items() if where == module)
    return sorted(name for name in named if getattr(getattr(ejkernel, name), "__module__", "") == module)


def is_foreign(found: Any) -> bool:
    """Whether it is another library's function."""
    return inspect.isfunction(found) and not found.__module__.startswith("ejkernel")


def objects(page: Reference) -> Iterator[str]:
    """Dotted names of what a page describes, functions first. What is another library's is described there."""
    seen: dict[str, None] = {}
    for home in page.homes:
        seen |= dict.fromkeys(f"ejkernel.{name}" for name in functions(home))
    seen |= dict.fromkeys(page.names)
    for module in page.modules:
        found = importlib.import_module(module)
        own = (name for name in found.__all__ if not is_foreign(getattr(found, name)))
        seen |= dict.fromkeys(f"{module}.{name}" for name in own)
    yield from seen


def entry(name: str) -> str:
    """What mkdocstrings reads for one object."""
    home = ELSEWHERE.get(name)
    return f"[](){{ #{name} }}\n::: {home}\n    options:\n      heading: {name}" if home else f"::: {name}"


def reference_page(page: Reference) -> str:
    """Markdown that mkdocstrings fills with signatures and docstrings."""
    classes = {
        name: f"ejkernel.{getattr(ejkernel, name).function.__name__}" for home in page.homes for name in class_apis(home)
    }
    parts = [f"# {page.title}", page.about, *(entry(name) for name in objects(page) if name.rpartition(".")[2] not in classes)]
    if classes:
        rows = (f"| [](){{ #ejkernel.{name} }}`{name}` | [`{function}`][{function}] |" for name, function in classes.items())
        parts += [
            "## Class APIs",
            "Each is its function as an object: `FlashAttention()(query, key, value)`.",
            "\n".join(("| class | function |", "|---|---|", *rows)),
        ]
    return "\n\n".join(parts) + "\n"


def papers_page() -> str:
    """The papers of each function that names some."""
    rows = ["| function | sources |", "|---|---|"]
    for name in sorted({name for page in REFERENCES.values() for home in page.homes for name in functions(home)}):
        if found := site_papers.sources(inspect.getdoc(getattr(ejkernel, name)) or ""):
            rows.append(f"| [`{name}`{{ .whole }}][ejkernel.{name}] | {found} |")
    return "\n\n".join(("# Papers", "What each function computes, by those who wrote it down first.", "\n".join(rows))) + "\n"


def staged_name(path: Path) -> str | None:
    """Where a page of the repository stands on the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return BESIDE.get(path.name) if path.parent == ROOT else None


def with_links(page: Path, pages: Path) -> str:
    """A page's text with links as they hold on the site; pictures from elsewhere are copied beside the pages."""
    own = staged_name(page)
    assert own is not None, page

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        file, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not file:
            return match[0]
        name = _staged_target(page, file, pages, picture=bool(mark))
        if name is None:
            return text
        return f"{mark}[{text}]({_relative(name, own)}{'#' + anchor if anchor else ''})"

    def source(match: re.Match[str]) -> str:
        name = _staged_target(page, match[2], pages, picture=True)
        assert name is not None
        return f'{match[1]}="{_relative(name, own)}"'

    pieces = FENCE.split(page.read_text())
    return "".join(
        piece
        if piece.startswith("```")
        else both_schemes(whole_identifiers(SOURCE.sub(source, LINK.sub(link, without_marks(piece)))))
        for piece in pieces
    )


def _staged_target(page: Path, file: str, pages: Path, *, picture: bool) -> str | None:
    """Where the file that a page names stands on the site; None if it does not."""
    wanted = (page.parent / file).resolve()
    name = staged_name(wanted)
    if name is None and picture:
        name = f"pictures/{wanted.name}"
        (pages / "pictures").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(wanted, pages / name)
    return name


def _relative(name: str, own: str) -> str:
    return os.path.relpath(name, Path(own).parent).replace(os.sep, "/")


def stage(out: Path) -> None:
    """Write the pages and the settings of the site below a folder, which is made afresh."""
    shutil.rmtree(out, ignore_errors=True)
    pages = out / "pages"
    pages.mkdir(parents=True)
    for path in (*sorted(DOCS.rglob("*")), *(ROOT / name for name in BESIDE)):
        name = staged_name(path)
        assert name is not None
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = with_links(path, pages)
            target.write_text(front_matter(text) + text)
        elif path.is_file():
            shutil.copyfile(path, target)
    (pages / "reference").mkdir()
    for name, page in REFERENCES.items():
        (pages / "reference" / f"{name}.md").write_text(reference_page(page))
    (pages / "reference" / "types.md").write_text(site_types.types_page())
    (pages / "reference" / "papers.md").write_text(papers_page())
    counted = write_section(sorted((ROOT / "benchmarks" / "results").glob("bench_*.json")), pages / "measurements")
    with (pages / "measurements" / "index.md").open("a") as page:
        page.write("\n| operation | beside other libraries |\n|---|---|\n")
        page.writelines(f"| [`{name}`{{ .whole }}]({name}.md) | {line} |\n" for name, line in counted.items())
    shutil.copyfile(SETTINGS, out / SETTINGS.name)


def main() -> int:
    stage(OUT)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(OUT / SETTINGS.name)]
    status = subprocess.run(command, cwd=OUT, env={**os.environ, "NO_COLOR": "1"}, check=False).returncode
    if status == 0:
        site_search.put_in_order(OUT / "html" / "search.json")
    return status


if __name__ == "__main__":
    sys.exit(main())

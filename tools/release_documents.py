"""What a release says of its parts: constraints with hashes for each kind of machine, and a bill of materials (CycloneDX).

python tools/release_documents.py dist    writes constraints-EXTRA.txt and ejkernel-VERSION.cdx.json beside the built files

Needs uv and cyclonedx-python-lib. The constraints hold the newest releases that our metadata admits on the day of the release, for
every supported Python and system; `pip install -c` takes them. Neither document names the index that they were found in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (*(f"ejkernel-{name}" for name in ("core", "xla", "triton", "pallas", "cuda")), "benchmarks", "examples/demo")
MACHINES = ("cpu", "cuda12", "cuda13", "tpu")
"""Extras of core that bring whole set-ups."""

NOTICES = ROOT / "ejkernel-cuda" / "THIRD_PARTY_NOTICES.md"
_PINNED = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?: ; (?P<marker>[^\\]+?))? \\$")
_HASH = re.compile(r"^ +--hash=sha256:([0-9a-f]{64})")
_NAMESPACE = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
"""Of names of domains, RFC 9562."""


def projects() -> dict[str, dict[str, Any]]:
    """The `[project]` table of each of our distributions, by name."""
    tables = (tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS)
    return {table["name"]: table for table in tables}


def third_party(name: str, extras: Iterable[str]) -> list[str]:
    """What one of our distributions needs of others, with these extras, also through our other distributions."""
    ours, found = projects(), dict[str, None]()

    def visit(name: str, extras: Iterable[str]) -> None:
        project = ours[name]
        optional = project.get("optional-dependencies", {})
        for text in (*project["dependencies"], *(item for extra in extras for item in optional[extra])):
            requirement = Requirement(text)
            if requirement.name in ours:
                visit(requirement.name, requirement.extras)
            else:
                found[text] = None

    visit(name, extras)
    return sorted(found)


def constraints(extra: str) -> str:
    """The lock of core with an extra and the command line: names, versions and hashes, in pip's format."""
    python = projects()["ejkernel-core"]["requires-python"].removeprefix(">=")
    quiet = ("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--quiet")
    command = (
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "-",
        "--universal",
        "--generate-hashes",
        "--python-version",
        python,
    )
    wanted = "\n".join(third_party("ejkernel-core", (extra, "cli")))
    text = subprocess.run((*command, *quiet), input=wanted, capture_output=True, text=True, check=True).stdout
    places = [line for line in text.splitlines() if "://" in line or " @ " in line]
    if places:
        raise SystemExit(f"{extra}: the constraints name a place: {places[0]}")
    return text


def pinned(text: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Name, version, marker and SHA-256 digests of each line of constraints."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if found := _PINNED.match(line):
            digests: list[str] = []
            for later in lines[number + 1 :]:
                if (digest := _HASH.match(later)) is None:
                    break
                digests.append(digest[1])
            yield found["name"], found["version"], (found["marker"] or "").strip(), digests


def linked() -> list[tuple[str, str]]:
    """Works of others that the compiled library of ejkernel-cuda holds parts of, and their licences, as its notices say."""
    rows = [line.strip("| ").split(" | ") for line in NOTICES.read_text().splitlines() if line.startswith("| ")]
    works = [(re.split(r"[,:(]", work)[0].strip(), terms) for work, _, _, terms in rows[1:]]
    return [(work, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", terms).partition(",")[0]) for work, terms in works]


def bill_of_materials(built: Iterable[Path], locks: Iterable[str]) -> str:
    """The CycloneDX document of a release, in JSON; the same for the same files.

    Args:
        built: the release's source distributions and wheels.
        locks: texts of constraints, whose releases are named with their hashes.
    """
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    def component(name: str, version: str, digests: Iterable[str], terms: str = "", *, package: bool = True) -> Component:
        url = PackageURL("pypi", name=name, version=version) if package else None
        return Component(
            name=name,
            version=version or None,
            type=ComponentType.LIBRARY,
            bom_ref=str(url or name),
            purl=url,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in sorted(set(digests))],
            licenses=[DisjunctiveLicense(name=terms)] if terms else [],
        )

    ours = projects()
    version = ours["ejkernel-core"]["version"]
    digests: dict[str, list[str]] = {name: [] for name in ours}
    for path in built:
        digests[canonicalize_name(path.name.split("-")[0])].append(hashlib.sha256(path.read_bytes()).hexdigest())
    own = {name: component(name, version, found, ours[name]["license"]) for name, found in digests.items()}
    releases: dict[tuple[str, str], set[str]] = {}
    for text in locks:
        for name, number, _, found in pinned(text):
            releases.setdefault((name, number), set()).update(found)
    others = {key: component(*key, found) for key, found in sorted(releases.items())}
    parts = [component(name, "", (), terms, package=False) for name, terms in linked()]

    bom = Bom(components=[*own.values(), *others.values(), *parts])
    bom.metadata.component = Component(name="ejkernel", version=version, type=ComponentType.LIBRARY, bom_ref="ejkernel")
    bom.register_dependency(bom.metadata.component, own.values())
    for name, part in own.items():
        needed = [own[n] for n in _direct(ours[name]) if n in own]
        needed += [found for (other, _), found in others.items() if other in _direct(ours[name])]
        bom.register_dependency(part, [*needed, *(parts if name == "ejkernel-cuda" else [])])
    content = "".join(digest for found in digests.values() for digest in sorted(found))
    bom.serial_number = uuid.uuid5(_NAMESPACE, f"ejkernel {version} {content}")
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["metadata"]["timestamp"]  # of today, which says nothing of the release
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _direct(project: dict[str, Any]) -> set[str]:
    optional = (item for items in project.get("optional-dependencies", {}).values() for item in items)
    return {canonicalize_name(Requirement(text).name) for text in (*project["dependencies"], *optional)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="folder of the built files")
    folder = parser.parse_args().dist
    locks = {extra: constraints(extra) for extra in MACHINES}
    for extra, text in locks.items():
        (folder / f"constraints-{extra}.txt").write_text(text)
    built = sorted((*folder.glob("*.whl"), *folder.glob("*.tar.gz")))
    version = projects()["ejkernel-core"]["version"]
    (folder / f"ejkernel-{version}.cdx.json").write_text(bill_of_materials(built, locks.values()))


if __name__ == "__main__":
    main()

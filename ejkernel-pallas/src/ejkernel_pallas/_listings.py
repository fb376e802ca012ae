"""Reads the listings that the TPU compiler can write of every kernel.

An environment variable requests them; libtpu reads it once per process, at its first use.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
_FILE = re.compile(r"\d+-(.+?)(?:\.\d+)?-\d+-([a-z].*)\.txt")
_ALLOCATION = re.compile(r"space=vmem, size = 0x([0-9a-f]+), scoped")
_SPILL = re.compile(r"#(allocation\d+)_spill")
_SPILL_BYTES = 4096
"""Of one vector register."""
_ALLOCATIONS, _UTILISATION, _BUNDLES = (
    "pre-finalize-registers-and-allocations",
    "final_hlo-static-per-bundle-utilization",
    "final_bundles",
)


@dataclasses.dataclass(frozen=True)
class Listing:
    """One kernel.

    Attributes:
        vmem: bytes of VMEM: block buffers, scratch, compiler temporaries and spilled registers.
        bundles: VLIW instructions of its program; those of a loop count once.
        spilled: bytes of VMEM that hold spilled registers.
    """

    vmem: int
    bundles: int
    spilled: int


def request_listings(folder: Path) -> None:
    """Request listings in the folder. Has no effect once the process has used libtpu."""
    flags = _FLAGS.format(folder=folder)
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


def taken(folder: Path) -> dict[str, Listing]:
    """Read the listings in the folder by kernel name, keeping the largest of each name, and empty the folder."""
    texts: dict[str, dict[str, str]] = {}
    for path in sorted(folder.iterdir()):
        found = _FILE.fullmatch(path.name)
        if found and found[2] in (_ALLOCATIONS, _UTILISATION, _BUNDLES):
            instruction = path.name.removesuffix(f"-{found[2]}.txt").rsplit("-", 1)[0]
            texts.setdefault(instruction, {"name": found[1]})[found[2]] = path.read_text()
        path.unlink()
    kernels: dict[str, Listing] = {}
    for listed in texts.values():
        # The last bundle names the instruction; TLP is the surrounding program.
        if listed["name"] != "TLP" and len(listed) == 4 and "custom-call(" in listed[_BUNDLES][-2000:]:
            listing = _listing(listed)
            known = kernels.get(listed["name"])
            if known is None or known.vmem < listing.vmem:
                kernels[listed["name"]] = listing
    return kernels


def _listing(texts: dict[str, str]) -> Listing:
    table = texts[_UTILISATION].partition("== UTILIZATION:\n")[2]
    return Listing(
        sum(int(size, 16) for size in _ALLOCATION.findall(texts[_ALLOCATIONS])),
        sum(bool(line.strip()) for line in table.splitlines()),
        _SPILL_BYTES * len(set(_SPILL.findall(texts[_BUNDLES]))),
    )

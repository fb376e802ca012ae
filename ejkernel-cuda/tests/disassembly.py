"""Facts about the SASS of the attention kernels, read from the built library.

    python ejkernel-cuda/tests/disassembly.py --out benchmarks/results/cuda_attention_sass.json

Needs cuobjdump and nvdisasm, of a CUDA toolkit or as Triton's package carries them, and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from ejkernel_cuda import _library

_KERNEL = re.compile(
    r"Function (?P<name>\S*flash_attention\S*attend\S*Shape\S*?(?P<dtype>bfloat16|half)"
    r"Li(?P<size>\d+)ELi(?P<block_k>\d+)ELi(?P<consumers>\d+)ELi(?P<stages>\d+)E\S*):\s*"
    r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:\d+ LOCAL:(?P<local>\d+)"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Attributes:
    size, block_k, consumers, stages: template arguments.
    registers: registers per thread before setmaxnreg.
    stack, local: bytes per thread; 0 unless registers spill.
    products: wgmma instructions.
    loads, stores: TMA instructions.
    spills: loads and stores of local memory.
    issued: wgmmas of the main loop before its first wait.
    hidden_exponentials: exponentials of the main loop between the wait for QK and the wait for PV, which overlap PV.
    """

    name: str
    dtype: str
    size: int
    block_k: int
    consumers: int
    stages: int
    registers: int
    stack: int
    local: int
    products: int
    loads: int
    stores: int
    spills: int
    issued: int
    hidden_exponentials: int

    @property
    def steps(self) -> int:
        """wgmmas of one iteration: of QK and of PV."""
        return self.size // 16 + self.block_k // 16

    def problems(self) -> list[str]:
        """Facts that make it slow or wrong; empty for a good kernel."""
        found = []
        if self.stack or self.local or self.spills:
            found.append(f"registers spill: {self.stack} bytes, {self.spills} accesses")
        if self.products != 2 * self.steps:
            found.append(f"{self.products} wgmmas instead of {2 * self.steps}")
        if not self.loads or not self.stores:
            found.append("no TMA instructions")
        if self.issued != self.steps:
            found.append(f"{self.issued} of {self.steps} wgmmas are issued before the first wait")
        if self.hidden_exponentials < self.block_k // 2:
            found.append(f"{self.hidden_exponentials} of {self.block_k // 2} exponentials overlap a wgmma")
        return found


def tool() -> str | None:
    """Path of a cuobjdump with nvdisasm in the same folder; None if there is none."""
    spec = importlib.util.find_spec("triton")
    folder = pathlib.Path(spec.origin).parent / "backends" / "nvidia" / "bin" if spec and spec.origin else None
    places = f"{os.environ.get('PATH', '')}{os.pathsep}{folder or ''}"
    found = shutil.which("cuobjdump", path=places)
    return found if found and shutil.which("nvdisasm", path=str(pathlib.Path(found).parent)) else None


def _run(*arguments: str) -> str:
    cuobjdump = tool()
    assert cuobjdump is not None
    environment = {**os.environ, "PATH": f"{pathlib.Path(cuobjdump).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [cuobjdump, *arguments, str(_library.PATH)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def _loop(code: str) -> tuple[int, int]:
    """Products before the wait that leaves one group under way, and exponentials from there to the next wait."""
    before, after = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", code, maxsplit=1)
    issued = re.split(r"WARPGROUP\.DEPBAR", before)[-1].count("HGMMA")
    return issued, re.split(r"WARPGROUP\.DEPBAR", after)[0].count("MUFU.EX2")


def kernels() -> list[Kernel]:
    """Those of the built library for sm_90a."""
    rows = [row.groupdict() for row in _KERNEL.finditer(_run("--dump-resource-usage")) if int(row["registers"]) > 64]
    code = _run("-sass", "-arch", "sm_90a", "-fun", ",".join(row["name"] for row in rows)) if rows else ""
    found = []
    for row in rows:
        own = code.split(f"Function : {row['name']}\n")[1].split("Function : ")[0]
        issued, hidden = _loop(own)
        count = {name: len(re.findall(rf"\b{word}", own)) for name, word in _WORDS.items()}
        facts = {name: value if name in ("name", "dtype") else int(value) for name, value in row.items()}
        found.append(Kernel(**facts, **count, issued=issued, hidden_exponentials=hidden))
    return sorted(found, key=lambda kernel: (kernel.dtype, kernel.size, kernel.block_k))


_WORDS = {"products": "HGMMA", "loads": "UTMALDG", "stores": "UTMASTG", "spills": r"(?:LDL|STL)\b"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    given = parser.parse_args()
    if tool() is None:
        print("needs cuobjdump and nvdisasm on the PATH or in Triton's package")
        return 2
    found = kernels()
    for kernel in found:
        print(f"{kernel.dtype} {kernel.size} {kernel.block_k}: {'; '.join(kernel.problems()) or 'good'}")
    if given.out:
        version = re.search(r"V([\d.]+)", _run("--version"))
        document = {
            "disassembler": version and version[1],
            "kernels": [dataclasses.asdict(kernel) for kernel in found],
        }
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if not found or any(kernel.problems() for kernel in found) else 0


if __name__ == "__main__":
    sys.exit(main())

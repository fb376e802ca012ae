"""`python -m ejkernel_train.export`: write a run's newest checkpoint as a public model, see `public.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ejkernel_train import public
from ejkernel_train.resume import model_of


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("ejkernel_train.export", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help="what a run had as --checkpoints")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for config.json and model.safetensors")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--max-length", type=int, default=2048, metavar="TOKENS", help="what config.json says of a new model")
    arguments = parser.parse_args(argv)
    try:
        model = model_of(arguments.checkpoint)
        for file in public.save(model, arguments.out, arguments.dtype, length=arguments.max_length):
            print(f"{file}: {file.stat().st_size / 1e6:,.1f} MB")
    except (ImportError, OSError, ValueError) as error:
        missing = "; pip install ejkernel-train[checkpoints,public]" if isinstance(error, ImportError) else ""
        print(f"error: {error}{missing}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

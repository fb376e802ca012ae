"""The build backend of the repository's root, which is no distribution: it says in one sentence what to install instead."""

from __future__ import annotations

import sys
from typing import Any, NoReturn


def _refuse(*_: Any, **__: Any) -> NoReturn:
    sys.exit(
        "The root of this repository is not a distribution; for development run: "
        'pip install -e "./ejkernel-core[cli,testing]" -e ./ejkernel-xla -e ./ejkernel-triton'
    )


build_sdist = build_wheel = build_editable = _refuse
get_requires_for_build_sdist = get_requires_for_build_wheel = get_requires_for_build_editable = _refuse

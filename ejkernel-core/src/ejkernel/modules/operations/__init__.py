"""The public functions, their class APIs and their portable configs, under the path that older clients import them from."""

from __future__ import annotations

import importlib
from typing import Any

from ejkernel._plugins.catalog import functions_in
from ejkernel.utils.former_paths import former_module

for _name in functions_in("ejkernel.modules"):  # each had a module of its own
    former_module(f"{__name__}.{_name}", {_name: f"ejkernel.modules:{_name}"})


def __getattr__(name: str) -> Any:
    if not name.startswith("__"):
        for home in ("ejkernel.modules", "ejkernel.modules.operations.configs"):
            module = importlib.import_module(home)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module 'ejkernel.modules.operations' has no attribute {name!r}")


def __dir__() -> list[str]:
    homes = ("ejkernel.modules", "ejkernel.modules.operations.configs")
    return sorted({name for home in homes for name in importlib.import_module(home).__all__})

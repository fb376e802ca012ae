"""The public functions and their class APIs: thin facades over the operations.

A name is imported with its own module when it is asked for. Which module that is, `__all__` of each of them says.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel._plugins.catalog import FACADES, functions_in

if TYPE_CHECKING:  # what `__getattr__` below finds at run time
    from ejkernel.modules.block_sparse import *
    from ejkernel.modules.collectives import *
    from ejkernel.modules.constant_decays import *
    from ejkernel.modules.convolutions import *
    from ejkernel.modules.delta_products import *
    from ejkernel.modules.deltas import *
    from ejkernel.modules.dense_attention import *
    from ejkernel.modules.divergences import *
    from ejkernel.modules.dot_product import *
    from ejkernel.modules.executor import *
    from ejkernel.modules.gates import *
    from ejkernel.modules.latent import *
    from ejkernel.modules.latent_serving import *
    from ejkernel.modules.losses import *
    from ejkernel.modules.mamba import *
    from ejkernel.modules.matmuls import *
    from ejkernel.modules.mixture_of_experts import *
    from ejkernel.modules.norms import *
    from ejkernel.modules.operations.configs import *
    from ejkernel.modules.pooling import *
    from ejkernel.modules.probabilities import *
    from ejkernel.modules.recurrences import *
    from ejkernel.modules.ring import *
    from ejkernel.modules.rotary import *
    from ejkernel.modules.rotary_embedding import *
    from ejkernel.modules.sampling import *
    from ejkernel.modules.serving import *
    from ejkernel.modules.serving_decode import *
    from ejkernel.modules.serving_pages import *
    from ejkernel.modules.serving_updates import *
    from ejkernel.modules.sparse_attention import *
    from ejkernel.modules.sparse_latent import *
    from ejkernel.modules.split_sequences import *
    from ejkernel.modules.states import *
    from ejkernel.modules.xlstm import *

_HOME = "ejkernel.modules"
FUNCTIONS = functions_in(_HOME)
"""The public functions that platforms implement."""

_CONFIGS = "ejkernel.modules.operations.configs"


def _home(name: str) -> str | None:
    """The module of a public name; other packs have modules of their own."""
    module = FACADES.get(name, "")
    if module.rpartition(".")[0] == _HOME:
        return module
    return _CONFIGS if name.endswith("Config") and hasattr(importlib.import_module(_CONFIGS), name) else None


if not TYPE_CHECKING:  # checkers would take it to define every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return _names()
        home = None if name.startswith("_") else _home(name)
        if home is None:
            raise AttributeError(f"module {_HOME!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(importlib.import_module(home), name))


def _names() -> list[str]:
    configs = (name for name in importlib.import_module(_CONFIGS).__all__ if name.endswith("Config"))
    return sorted({"FUNCTIONS", *configs, *(name for name, home in FACADES.items() if home.rpartition(".")[0] == _HOME)})


def __dir__() -> list[str]:
    return sorted({*globals(), *_names()})

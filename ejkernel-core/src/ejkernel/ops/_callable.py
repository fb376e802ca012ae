"""`Kernel`: an operation of one's own with configs."""

from __future__ import annotations

from typing import Any

from ejkernel.ops._kernel import Cfg, KernelDefinition, Out
from ejkernel.ops._selection import ConfigSelectorChain


class Kernel(KernelDefinition[Cfg, Out]):
    """An operation of one's own whose config is chosen by the same tiers as those of the operations in core.

    A subclass defines `run` and `heuristic_cfg`. Configs are frozen dataclasses that never change a result beyond rounding.
    For another implementation of an operation in core, use `kernel_registry.register` instead.

    Args:
        op_id: its name, in keys and overlays; None takes the class attribute, or the name of the class.

    Attributes:
        op_id: see above.
        version: raise it when stored timings lose their meaning.

    Raises:
        ValueError: op_id is the name of an operation in core.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp
        >>> @dataclasses.dataclass(frozen=True)
        ... class Blocks:
        ...     rows: int = 8
        >>> class Double(Kernel[Blocks, jax.Array]):
        ...     def run(self, x, *, cfg):
        ...         return x * 2
        ...     def heuristic_cfg(self, inv):
        ...         return Blocks()
        >>> float(Double("double")(jnp.ones(())))
        2.0
    """

    def __call__(self, *args: Any, cfg: Any = None, **kwargs: Any) -> Out:
        """Choose a config and run.

        Args:
            *args: of `prepare`.
            cfg: the config, or a mapping of some of its fields; None asks the tiers.
            **kwargs: of `prepare`.
        """
        return ConfigSelectorChain().call(self, *args, cfg=cfg, **kwargs)

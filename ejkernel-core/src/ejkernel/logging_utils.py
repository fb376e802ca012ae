"""The former place of `ejkernel.loggings`: its names are handed on with a DeprecationWarning."""

from __future__ import annotations

from ejkernel.utils.former_paths import former_module, same_names

former_module(__name__, same_names("ejkernel.loggings", ("get_logger",)))

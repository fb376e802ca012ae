"""Config selection in seven tiers: override, overlay, memory, persistent, autotune, heuristic, error."""

from __future__ import annotations

from ejkernel._dispatch.recording import RecordedCall, record_calls
from ejkernel.configs.entry import Check, Entry, Timing
from ejkernel.configs.key import Key
from ejkernel.configs.memory import forget, remember, remembered
from ejkernel.configs.overlay import overlay
from ejkernel.configs.portable import BaseOperationConfig, BwdParams, FwdParams, demanded_platform
from ejkernel.configs.quarantine import Quarantined, QuarantinedError
from ejkernel.configs.result import AutotuningResult, KeyedConfigs
from ejkernel.configs.select import Selected, preferred_platform, select
from ejkernel.configs.spaces import as_setting, from_plain, to_plain
from ejkernel.configs.store import USER_CACHE
from ejkernel.tuning._autotune import Tuner, autotune, forward_autotune_only, install_tuner, tune
from ejkernel.tuning._manage import CacheFile, CacheInfo, cache_entries, cache_info, clear_cache, export_cache, merge_cache
from ejkernel.tuning._search import Search

store = USER_CACHE.store

__all__ = [
    "AutotuningResult",
    "BaseOperationConfig",
    "BwdParams",
    "CacheFile",
    "CacheInfo",
    "Check",
    "Entry",
    "FwdParams",
    "Key",
    "KeyedConfigs",
    "Quarantined",
    "QuarantinedError",
    "RecordedCall",
    "Search",
    "Selected",
    "Timing",
    "Tuner",
    "as_setting",
    "autotune",
    "cache_entries",
    "cache_info",
    "clear_cache",
    "demanded_platform",
    "export_cache",
    "forget",
    "forward_autotune_only",
    "from_plain",
    "install_tuner",
    "merge_cache",
    "overlay",
    "preferred_platform",
    "record_calls",
    "remember",
    "remembered",
    "select",
    "store",
    "to_plain",
    "tune",
]

"""Config selection in seven tiers: override, overlay, memory, persistent, autotune, heuristic, error."""

from __future__ import annotations

from ejkernel.tuning._autotune import Tuner, autotune, forward_autotune_only, install_tuner, tune
from ejkernel.tuning._configs import as_setting, from_plain, to_plain
from ejkernel.tuning._entry import Check, Entry, Timing
from ejkernel.tuning._key import Key
from ejkernel.tuning._manage import CacheFile, CacheInfo, cache_entries, cache_info, clear_cache, export_cache, merge_cache
from ejkernel.tuning._memory import forget, remember, remembered
from ejkernel.tuning._overlay import overlay
from ejkernel.tuning._portable import BaseOperationConfig, BwdParams, FwdParams, demanded_platform
from ejkernel.tuning._quarantine import Quarantined, QuarantinedError
from ejkernel.tuning._recording import RecordedCall, record_calls
from ejkernel.tuning._result import AutotuningResult, KeyedConfigs
from ejkernel.tuning._search import Search
from ejkernel.tuning._select import Selected, preferred_platform, select
from ejkernel.tuning._store import USER_CACHE

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

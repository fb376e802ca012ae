"""Entry points -> PluginRecord, one isolated step per plugin."""

from __future__ import annotations

import importlib_metadata

from ejkernel._records import PluginRecord
from ejkernel.plugin import ENTRY_POINT_GROUP


def discover() -> tuple[PluginRecord, ...]:
    """Find every installed plugin and say what became of it. Never raises because of a plugin."""
    records = []
    for entry in importlib_metadata.entry_points(group=ENTRY_POINT_GROUP):
        module = entry.load()
        dist = entry.dist
        records.append(PluginRecord(entry.name, dist.name, dist.version, entry.value, "ok", plugin=module.ejkernel_plugin(), module=module))
    return tuple(records)

"""The conformance kit's options and fixtures, and enough of XLA's threads for the interpreters of kernels."""

import os

pytest_plugins = ["ejkernel.testing.plugin"]

_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    # XLA has a thread per device or core, and the interpreter of Mosaic GPU kernels blocks one per warpgroup of a cluster
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

"""Which of the two compilers is under test, and enough threads for it."""

import os

import pytest

_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    # XLA has a thread per device or core, and the interpreter of Mosaic GPU kernels blocks one per warpgroup of a cluster
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ejkernel-mosaic",
        choices=("tpu", "gpu"),
        default="tpu",
        help="without a device: whose kernels the conformance suite runs, in their interpreter",
    )

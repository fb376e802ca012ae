"""Which of the two compilers is under test."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ejkernel-mosaic",
        choices=("tpu", "gpu"),
        default="tpu",
        help="without a device: whose kernels the conformance suite runs, in their interpreter",
    )

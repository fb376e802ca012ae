"""The conformance suite: the contract of every operation, executable against any platform.

A plugin author writes a test module with

    pytest_plugins = ["ejkernel.testing.plugin"]
    from ejkernel.testing.suite import *

and runs `pytest --ejkernel-platform=acme`. `--extent=quick` takes a sample of the suite, `--extent=full` also lowers every case for
every target.
"""

"""`use(...)` holds for the asyncio task or thread that entered it, and for nobody else."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import TracingError, explain
from ejkernel._plugins.task_local import TaskLocal
from ejkernel.call.policy import current_policy

X = jnp.ones((2, 8))


def setting():
    return explain("rms_norm", X).forward.setting


def test_tasks_do_not_see_each_others_settings():
    async def one(entered, seen):
        with ejkernel.use("xla"):
            entered.set()
            await seen.wait()
            return setting()

    async def other(entered, seen):
        await entered.wait()
        try:
            return setting()
        finally:
            seen.set()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(one(*events), other(*events))

    assert asyncio.run(both()) == ["use", "priority"]
    assert setting() == "priority"


def test_nothing_stays_in_force_when_blocks_end_in_another_order():
    """The first block ends before the second one, which began inside of it."""

    async def block(custom_gradients, before, after):
        await before.wait()
        with ejkernel.use(custom_gradients=custom_gradients):
            after[0].set()
            await after[1].wait()
            return current_policy().custom_gradients

    async def both():
        start, first, second = asyncio.Event(), asyncio.Event(), asyncio.Event()
        start.set()
        done = asyncio.Event()
        tasks = [
            asyncio.create_task(block(False, start, (first, second))),
            asyncio.create_task(block(True, first, (second, done))),
        ]
        answers = [await tasks[0]]
        done.set()
        return [*answers, await tasks[1]]

    assert asyncio.run(both()) == [False, True]
    assert current_policy().custom_gradients
    assert jax.jit(lambda x: ejkernel.rms_norm(x))(X).shape == X.shape


def test_a_compiled_function_follows_the_task_that_reads_a_setting(registered):
    traced = registered("mine", priority=-1)
    function = jax.jit(lambda x: ejkernel.rms_norm(x))
    function(X)

    async def one(entered, done):
        with ejkernel.use("mine"):
            function(X)
            entered.set()
            await done.wait()

    async def other(entered, done):
        await entered.wait()
        ejkernel.rms_norm(X)
        assert len(traced) == 1
        function(X)
        done.set()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(one(*events), other(*events))

    asyncio.run(both())
    assert len(traced) == 1


def test_tracing_under_another_tasks_setting_raises_and_works_again():
    function = jax.jit(lambda x: ejkernel.rms_norm(x, 1 + x[0]))

    async def one(entered, done):
        with ejkernel.use("xla"):
            entered.set()
            await done.wait()

    async def other(entered, done):
        await entered.wait()
        try:
            with pytest.raises(TracingError, match=r"^use: jax\.jit is tracing under the settings of another asyncio task"):
                function(X)
            return function(X)
        finally:
            done.set()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        return (await asyncio.gather(one(*events), other(*events)))[1]

    assert asyncio.run(both()).shape == X.shape


def test_to_thread_takes_the_setting_along_and_other_threads_do_not():
    async def ask():
        with ejkernel.use("xla"):
            return await asyncio.to_thread(setting)

    assert asyncio.run(ask()) == "use"
    found = []
    with ejkernel.use("xla"):
        thread = threading.Thread(target=contextvars.Context().run, args=(lambda: found.append(setting()),))
        thread.start()
        thread.join()
    assert found == ["priority"]


def test_an_asynchronous_generator_closed_by_another_task():
    async def values():
        with ejkernel.use("xla"):
            yield setting()
            yield setting()

    async def first(generator):
        return await anext(generator)

    async def main():
        generator = values()
        found = await asyncio.create_task(first(generator))
        await asyncio.create_task(generator.aclose())
        return found, setting()

    assert asyncio.run(main()) == ("use", "priority")
    assert setting() == "priority"


def test_overlay_and_results_are_settings_too():
    async def one(entered, done):
        with ejkernel.overlay({"rms_norm": {"nonsense": 1}}):
            entered.set()
            await done.wait()

    async def other(entered, done):
        await entered.wait()
        try:
            return current_policy().overlay
        finally:
            done.set()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        return (await asyncio.gather(one(*events), other(*events)))[1]

    assert asyncio.run(both()) == ()


def test_values_nest_and_end():
    held = TaskLocal("test")
    with held.holding(1):
        with held.holding(2):
            assert held.get() == 2
        assert held.get() == 1
    assert held.get() is None


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.jit, jax.checkpoint])
def test_autotune_while_tracing_is_refused(transform):
    def program(x):
        ejkernel.autotune(ejkernel.rms_norm, jax.ShapeDtypeStruct((2, 8), "float32"))
        return (x * x).sum()

    with pytest.raises(TracingError, match="autotune: called while a program is traced"):
        transform(program)(X)

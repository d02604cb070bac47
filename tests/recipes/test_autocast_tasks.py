"""autocast among asyncio tasks, generators and threads: a recipe holds for who entered it, or there is an error."""

import asyncio
import contextlib
import threading

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp

FULL = jlp.NVFP4BlockScaling()
PLAIN = jlp.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
AWAITS = "awaits within the block"


def traced_under():
    """A jitted function that gives 0, 1 or 2 by the recipe that it was traced under, compiled for all three."""
    codes = {None: 0, FULL: 1, PLAIN: 2}
    function = jax.jit(lambda x: x * 0 + codes[jlp.current_recipe()])
    for recipe in codes:
        with jlp.autocast(recipe, enabled=recipe is not None):
            function(jnp.zeros(()))
    return lambda: {v: k for k, v in codes.items()}[int(function(jnp.zeros(())))]


@pytest.fixture(autouse=True)
def nothing_stays_set():
    yield
    assert jlp.current_recipe() is None
    seen = []
    jax.jit(lambda x: seen.append(jlp.current_recipe()) or x)(1.0)
    assert seen == [None]


class TestTasks:
    def test_blocks_that_do_not_await_hold_among_many_tasks(self):
        compiled = traced_under()

        async def task(recipe):
            for _ in range(20):
                with jlp.autocast(recipe):
                    assert jlp.current_recipe() is recipe
                    assert compiled() is recipe
                assert compiled() is None
                await asyncio.sleep(0)

        async def main():
            await asyncio.gather(*(task(r) for r in (FULL, PLAIN) * 4))

        asyncio.run(main())

    @pytest.mark.parametrize("wait", [0, 0.01])
    def test_a_block_that_awaits_is_an_error_at_the_await(self, wait):
        reached = []

        async def task():
            with jlp.autocast(FULL):
                await asyncio.sleep(wait)
                reached.append("past the await")

        async def main():
            with pytest.raises(RuntimeError, match=AWAITS):
                await task()
            assert asyncio.current_task().cancelling() == 0
            assert jlp.current_recipe() is None
            await asyncio.sleep(0)

        asyncio.run(main())
        assert reached == []

    def test_tasks_never_run_under_a_waiting_tasks_recipe(self):
        compiled, found = traced_under(), []

        async def waiting():
            with jlp.autocast(FULL):
                await asyncio.sleep(0.01)

        async def asking():
            jlp.current_recipe()

        async def entering():
            with jlp.autocast(PLAIN):
                pass

        async def later():
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(compiled())

        async def main():
            return await asyncio.gather(waiting(), asking(), entering(), later(), return_exceptions=True)

        first, second, third, fourth = asyncio.run(main())
        assert AWAITS in str(first)
        for told in (second, third):
            assert "the recipe is that of another asyncio task" in str(told)
        assert fourth is None and found == [None] * 3

    def test_awaits_that_do_not_wait_are_none(self):
        async def value():
            return jlp.current_recipe()

        async def main():
            with jlp.autocast(FULL):
                return await value()

        assert asyncio.run(main()) is FULL

    def test_tasks_of_a_block_around_the_event_loop_follow_it(self):
        compiled = traced_under()

        async def task():
            await asyncio.sleep(0)
            with jlp.autocast(PLAIN):
                assert compiled() is PLAIN
            return compiled()

        async def main():
            return await asyncio.gather(task(), task())

        with jlp.autocast(FULL):
            assert asyncio.run(main()) == [FULL, FULL]

    def test_nested_blocks_are_one_error(self):
        async def main():
            with pytest.raises(RuntimeError, match=AWAITS), jlp.autocast(FULL), jlp.autocast(PLAIN):
                await asyncio.sleep(0)
            assert jlp.current_recipe() is None
            with jlp.autocast(PLAIN):
                assert jlp.current_recipe() is PLAIN

        asyncio.run(main())

    def test_a_block_that_swallows_the_error_raises_when_left(self):
        async def main():
            swallowed = contextlib.suppress(asyncio.CancelledError)
            with pytest.raises(RuntimeError, match=AWAITS), jlp.autocast(FULL), swallowed:
                await asyncio.sleep(0.01)

        asyncio.run(main())

    def test_a_cancellation_from_elsewhere_stays_one(self):
        async def waiting():
            with jlp.autocast(FULL):
                await asyncio.sleep(1)

        async def main():
            task = asyncio.create_task(waiting())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())

    def test_a_timeout_around_the_block_does_not_hide_the_error(self):
        async def main():
            async with asyncio.timeout(5):
                with pytest.raises(RuntimeError, match=AWAITS), jlp.autocast(FULL):
                    async with asyncio.timeout(5):
                        await asyncio.sleep(0.01)

        asyncio.run(main())


class TestDecoratedFunctions:
    def test_only_its_async_functions_follow_it_across_awaits(self):
        compiled = traced_under()

        async def steps(recipe):
            for _ in range(10):
                assert jlp.current_recipe() is recipe
                assert compiled() is recipe
                await asyncio.sleep(0)
            return recipe

        async def main():
            tasks = [jlp.autocast(r)(steps)(r) for r in (FULL, PLAIN) * 2]
            tasks += [steps(None), jlp.autocast(enabled=False)(steps)(None)]
            return await asyncio.gather(*tasks)

        assert asyncio.run(main()) == [FULL, PLAIN, FULL, PLAIN, None, None]

    def test_errors_and_cancellations_pass_through(self):
        @jlp.autocast(FULL)
        async def failing():
            await asyncio.sleep(0)
            raise ValueError("inside")

        @jlp.autocast(FULL)
        async def waiting():
            try:
                await asyncio.sleep(10)
            finally:
                assert jlp.current_recipe() is FULL

        async def main():
            with pytest.raises(ValueError, match="inside"):
                await failing()
            task = asyncio.create_task(waiting())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())

    def test_functions_and_generators(self):
        @jlp.autocast(FULL)
        def plain(a, *, b):
            """Its text."""
            return a, b, jlp.current_recipe()

        @jlp.autocast(PLAIN)
        def counting(n):
            for i in range(n):
                sent = yield i, jlp.current_recipe()
                assert sent is None or sent == i
            return "end"

        assert plain(1, b=2) == (1, 2, FULL) and plain.__doc__ == "Its text."
        generator = counting(3)
        assert next(generator) == (0, PLAIN) and jlp.current_recipe() is None
        with jlp.autocast(FULL):
            assert generator.send(0) == (1, PLAIN) and jlp.current_recipe() is FULL
        generator.close()
        assert list(counting(2)) == [(0, PLAIN), (1, PLAIN)]

    def test_async_generators_are_refused(self):
        async def generator():
            yield

        with pytest.raises(TypeError, match="async generator function"):
            jlp.autocast(FULL)(generator)


class TestGenerators:
    def block(self, recipe):
        with jlp.autocast(recipe):
            yield

    def test_a_context_manager_may_be_made_of_one(self):
        with contextlib.contextmanager(self.block)(FULL):
            assert jlp.current_recipe() is FULL
        assert jlp.current_recipe() is None

    def test_ended_in_another_order_the_right_recipe_stays(self):
        first, second = self.block(FULL), self.block(PLAIN)
        next(first), next(second)
        first.close()
        assert jlp.current_recipe() is PLAIN
        second.close()
        assert jlp.current_recipe() is None

    def test_ending_within_a_later_block_leaves_it_alone(self):
        generator = self.block(FULL)
        next(generator)
        with jlp.autocast(PLAIN):
            generator.close()
            assert jlp.current_recipe() is PLAIN
        assert jlp.current_recipe() is None


def in_a_thread(function):
    """What the function raises in a thread of its own."""
    found = []

    def run():
        try:
            found.append(function())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class TestThreads:
    def test_one_context_may_be_entered_by_several(self):
        context = jlp.autocast(FULL)

        def other():
            with context:
                return jlp.current_recipe()

        with context, context:
            assert in_a_thread(other) is FULL
            assert in_a_thread(jlp.current_recipe) is None
            assert jlp.current_recipe() is FULL

    def test_a_block_left_in_another_thread_is_an_error(self):
        context = jlp.autocast(FULL)

        def leave():
            context.__exit__(None, None, None)

        with context:
            assert "left in another thread" in str(in_a_thread(leave))
            assert jlp.current_recipe() is FULL

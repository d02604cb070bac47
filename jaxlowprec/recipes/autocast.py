"""The scoped recipe: what `linear`, `dot_general`, `einsum` and the layers use if they are not given one.

JAX keeps the recipe per thread, as part of jit's cache key, and reads it without calling this module. If an asyncio
task waited within a scope, its recipe would apply to every other task, so such a task is stopped.
"""

from __future__ import annotations

import asyncio
import collections.abc
import copy
import enum
import functools
import inspect
import threading
from typing import Any

import jax

from jaxlowprec.arguments import a_flag, a_text, one_of, shown
from jaxlowprec.ops.kv_cache import KVCache
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.roles import Recipe
from jaxlowprec.recipes.transformer_engine import Calibrating, DelayedScaling


class _Default(enum.Enum):
    """Defaults of arguments, each known by identity, also in another process."""

    FROM_CONTEXT = enum.auto()

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


FROM_CONTEXT: Any = _Default.FROM_CONTEXT
"""The default of every `recipe=`: use the recipe of `autocast`. `recipe=None` means high precision."""

_context = jax.make_user_context(None)
_kv_context = jax.make_user_context(None)
_read: set[KVCache | None] = set()
"""The caches whose formats have been asked for, since the process began; see `silence`."""
_REMEDY = (
    "leave the block before awaiting, pass recipe=, or decorate the async function with @jaxlowprec.autocast(recipe), "
    "which holds across its awaits"
)


class _Scope:
    """A block that was entered and not left yet.

    Attributes:
        owner: the `autocast` that was entered.
        task: the asyncio task that entered it, or None.
        cancels: whether it has to withdraw the cancellation that told its task that it waits within the block.
    """

    def __init__(self, owner: autocast, task: asyncio.Task[Any] | None):
        self.owner, self.task, self.cancels = owner, task, False


class _Here(threading.local):
    """The scopes that are entered in this thread.

    Attributes:
        scopes: the scopes in force, the innermost last.
        waited: scopes whose task began to wait within them: no longer in force, but not left yet.
        watching: the event loop that will check whether a task left a scope open.
    """

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []
        self.waited: list[_Scope] = []
        self.watching: asyncio.AbstractEventLoop | None = None


_here = _Here()


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop is running
        return None


def _refuse_anothers_scope(who: str) -> None:
    """Raises RuntimeError in a task or callback that runs while another task waits within its scope."""
    task = _here.scopes[-1].task if _here.scopes else None
    if task is not None and task is not _current_task():
        raise RuntimeError(
            f"{who}: the recipe is that of another asyncio task, {task!r}, which awaits within its autocast block; "
            f"there, {_REMEDY}"
        )


def _set_innermost() -> None:
    """Sets JAX's values to those of the innermost scope."""
    owner = _here.scopes[-1].owner if _here.scopes else None
    _context(owner and owner.recipe).__enter__()
    _kv_context(owner and owner.kv_cache).__enter__()


def _take_back_what_waits() -> None:
    """The event loop calls this between the steps of its tasks: a task that has a scope open now waits within it.

    The task is told by a cancellation, the only way to raise where it waits. Leaving the block turns that into an error
    with the reason.
    """
    _here.watching = None
    waiting = [scope for scope in _here.scopes if scope.task is not None]
    _here.scopes = [scope for scope in _here.scopes if scope.task is None]
    _here.waited += waiting
    _set_innermost()
    innermost = {scope.task: scope for scope in waiting}
    for task, scope in innermost.items():
        scope.cancels = task is not None and task.cancel("it awaits within a jaxlowprec.autocast block")


class autocast:
    """Within the context, layers without a recipe of their own follow `recipe`.

        with jaxlowprec.autocast(recipe): ...

    Contexts nest and are restored after exceptions. The recipe is part of jit's cache key: under another recipe a
    jitted function is traced again, and under the first one it is found in the cache. The recipe is read when a
    function is traced and kept for its backward pass, even if that runs under another one.

    It can also decorate functions: each call then runs within the context.

    * Threads: each has its own recipe; a thread that is started within a context has none.
    * asyncio tasks: a block applies to the task that entered it, as long as the task does not wait. An await that waits
      within the block raises RuntimeError (as does another task that runs first and asks for the recipe), because every
      task of the thread would run under that recipe. A decorated async function keeps the recipe across its awaits;
      other tasks, and tasks that it starts, do not get it.
    * Generators: after a `yield` within a block, the recipe stays in force in the code that resumed the generator,
      until that goes on. So `contextlib.contextmanager` works, and generators may finish in any order without
      leaving a wrong recipe behind. A decorated generator function has the recipe only while its own code runs.

    Arguments:
        recipe: for example `NVFP4BlockScaling()`. May be left out with `kv_cache`: products are in high precision then.
        enabled: False switches to high precision, whatever the outer context is.
        calibrating: for `DelayedScaling`: compute in high precision, and record amaxes so that scales are known when
            quantisation is switched on.
        kv_cache: a `KVCache`, or the name of one, see `Generator`: the full pass of a `Decoder` reads keys and values
            as that cache keeps them, with a straight-through derivative, so that it trains what is served. Other models
            ask for `current_kv_cache().as_kept(k, v)`. None: they are not quantised.
        strict: what happens when the block is left and no layer has followed the recipe, a rule of `PerLayer` has
            matched none, or nothing has asked for `kv_cache`: False warns, once; True raises; None does nothing.

    Raises:
        TypeError: the recipe is missing or is not a recipe.
        ValueError: `kv_cache` is something else, or given with `enabled=False`; `calibrating` with a recipe that keeps
            no amaxes; when the block is left: see `strict`.
        RuntimeError: when the block is left: the task awaited within it, or another thread had entered it.

    >>> import jaxlowprec as jlp
    >>> with jlp.autocast(jlp.NVFP4BlockScaling()):
    ...     with jlp.autocast(enabled=False):
    ...         print(jlp.current_recipe())
    None
    """

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        enabled: bool = True,
        calibrating: bool = False,
        kv_cache: KVCache | str | None = None,
        strict: bool | None = False,
    ):
        a_flag("autocast", enabled=enabled, calibrating=calibrating)
        one_of("autocast", "strict", strict, True, False, None)
        if enabled and not isinstance(recipe, Recipe) and not (recipe is None and kv_cache is not None):
            raise TypeError(
                f"autocast: recipe={shown(recipe)}; needs a recipe such as NVFP4BlockScaling(), or enabled=False"
            )
        if not enabled and recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"autocast: recipe={shown(recipe)}; needs a recipe such as NVFP4BlockScaling(), or none")
        if calibrating:
            if not isinstance(recipe, DelayedScaling):
                raise ValueError(
                    f"autocast: calibrating=True with recipe={recipe!r}; it is for DelayedScaling's amax histories"
                )
            recipe, enabled = Calibrating(recipe), True
        self.recipe = recipe if enabled else None
        if kv_cache is not None and not enabled:
            raise ValueError("autocast: enabled=False with kv_cache=; nothing is quantised then: leave one of them out")
        self.kv_cache = None if kv_cache is None else KVCache.of("autocast", kv_cache)
        self.strict = strict

    def __enter__(self) -> None:
        _refuse_anothers_scope("autocast")
        task = _current_task()
        _here.scopes.append(_Scope(self, task))
        _set_innermost()
        if task is not None and _here.watching is not (loop := asyncio.get_running_loop()):
            _here.watching = loop
            loop.call_soon(_take_back_what_waits)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        entered = [scope for scope in (*_here.scopes, *_here.waited) if scope.owner is self]
        if not entered:
            raise RuntimeError(
                "autocast: a block is left in another thread than it was entered in, which keeps its recipe; finish a "
                "generator in the thread that began it"
            )
        task = _current_task()
        scope = next((s for s in reversed(entered) if s.task is task), entered[-1])  # any task may finish a generator
        if scope in _here.waited:
            _here.waited.remove(scope)
            _raise_awaited(scope, error)
        else:
            _here.scopes.remove(scope)
            _set_innermost()
        if error is None and self.strict is not None:
            self._check()

    def _check(self) -> None:
        """Warns, or raises, if the recipe or the cache's formats did nothing."""
        recipe: Any = self.recipe
        found = [] if recipe is None else silence.of_scope(recipe)
        if self.kv_cache is not None and self.kv_cache not in _read:
            found.append(
                f"nothing read keys and values as {self.kv_cache} keeps them; use Decoder, or "
                "current_kv_cache().as_kept in your attention"
            )
        if found and self.strict:
            raise ValueError("autocast: " + "; ".join(found))
        silence.warn_once("autocast", recipe, found, depth=2)

    def __call__(self, function: Any) -> Any:
        """The function with each call within the context; a coroutine or generator only while it is running."""
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                f"autocast: {function!r} is an async generator function; needs a function, a generator function or an "
                "async function: decorate what it calls"
            )

        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(self, function(*args, **kwargs))

        def run_generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from _Steps(self, function(*args, **kwargs)))

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        if inspect.iscoroutinefunction(function):
            return functools.wraps(function)(run_coroutine)
        return functools.wraps(function)(run_generator if inspect.isgeneratorfunction(function) else run)


def _raise_awaited(scope: _Scope, error: BaseException | None) -> None:
    """Raises the error of a block within which its task waited, unless another error is being raised already."""
    others = scope.task.uncancel() if scope.cancels and scope.task is not None else 0
    if isinstance(error, GeneratorExit) or (error is not None and (others or not scope.cancels)):
        return
    raise RuntimeError(f"autocast: its asyncio task awaits within the block, where other tasks run; {_REMEDY}") from (
        None if isinstance(error, asyncio.CancelledError) else error
    )


class _Steps(collections.abc.Generator):
    """A coroutine or generator whose steps, each up to where it waits, run within a context."""

    def __init__(self, context: autocast, inner: Any):
        self.context, self.inner = copy.copy(context), inner
        self.context.strict = None  # a step need not call any layer

    def __await__(self) -> _Steps:
        return self

    def send(self, value: Any) -> Any:
        """Runs the next step."""
        with self.context:
            return self.inner.send(value)

    def throw(self, *error: Any) -> Any:
        """Runs the next step, which begins with an exception."""
        with self.context:
            return self.inner.throw(*error)

    def close(self) -> None:
        """Ends the coroutine or generator where it waits."""
        with self.context:
            self.inner.close()


def current_recipe() -> Recipe | None:
    """The recipe of the innermost `autocast`; None outside any, and if it is disabled.

    Raises:
        RuntimeError: the recipe belongs to another asyncio task, see `autocast`.
    """
    _refuse_anothers_scope("current_recipe")
    return _context.value


def current_kv_cache() -> KVCache | None:
    """The KVCache of the innermost `autocast`; None outside any, and if that has none.

    Raises:
        RuntimeError: it belongs to another asyncio task, see `autocast`.

    >>> import jaxlowprec as jlp
    >>> with jlp.autocast(jlp.Int4QAT(), kv_cache="int8"):
    ...     print(jlp.current_kv_cache().key)
    Int8Rows cache rule
    """
    _refuse_anothers_scope("current_kv_cache")
    _read.add(_kv_context.value)
    return _kv_context.value


def resolve(who: str, recipe: Any, name: str | None = None) -> Recipe | None:
    """The recipe that a `recipe=` argument stands for here, for the layer of that name if one is given."""
    if name is not None:
        a_text(who, name=name)
    if recipe is FROM_CONTEXT:
        _refuse_anothers_scope(who)
        recipe = _context.value
        if recipe is not None and name is not None:
            silence.saw(recipe, [name])
    if recipe is None:
        return None
    if isinstance(recipe, Recipe):
        return recipe if name is None else recipe.at(name)
    raise TypeError(
        f"{who}: recipe={shown(recipe)}; needs a recipe such as NVFP4BlockScaling(), None for high precision, or "
        "FROM_CONTEXT for that of autocast"
    )

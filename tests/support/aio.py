"""The async shell as if it were the sync one: its calls run in an event loop of another thread.

Only for tests. Whatever a test does with a bus, a bell or a connection of the sync shell it can do with these, from any
number of threads at once.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from doorbell_postgres.aio import AsyncDoorbell, AsyncMessageBus, AsyncStep, AsyncStore, AsyncTurn

_LOCK = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _LOCK:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="the aio shell's loop", daemon=True).start()
    return _loop


def run(coroutine: Coroutine[Any, Any, Any], serve: queue.SimpleQueue[Any] | None = None) -> Any:
    """What the coroutine returns or raises; meanwhile this thread makes the calls that come in by `serve`."""
    future = asyncio.run_coroutine_threadsafe(coroutine, loop())
    if serve is not None:
        future.add_done_callback(lambda _: serve.put(None))
        while (call := serve.get()) is not None:
            call()
    return future.result()


async def _call(function: Callable[[], Any]) -> Any:
    result = function()
    return await result if inspect.isawaitable(result) else result


def _real(thing: Any) -> Any:
    return thing._real if isinstance(thing, Connection) else thing


def _names(cls: type) -> Iterator[tuple[str, Any]]:
    return ((name, inspect.getattr_static(cls, name)) for name in dir(cls) if not name.startswith("_"))


def _method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {key: _real(value) for key, value in kwargs.items()}
        return run(_call(lambda: getattr(self._real, name)(*args, **kwargs)))

    return method


def _property(name: str) -> property:
    return property(lambda self: getattr(self._real, name))


def _copy_public_names(cls: Any, original: type) -> None:
    cls.__signature__ = inspect.signature(original)
    for name, value in _names(original):
        if name not in vars(cls):
            setattr(cls, name, _property(name) if isinstance(value, property) else _method(name, value))


class Owner:
    """What bus, store and bell have in common."""

    _real: Any

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        run(self._real.close())


class Activity(threading.Condition):
    """An asyncio.Condition with the methods of a threading.Condition."""

    def __init__(self, real: asyncio.Condition) -> None:
        super().__init__()
        self._real = real

    def __enter__(self) -> bool:
        return bool(run(self._real.acquire()))

    def __exit__(self, *exc: object) -> None:
        run(_call(self._real.release))

    def notify_all(self) -> None:
        run(_call(self._real.notify_all))

    def wait(self, timeout: float | None = None) -> bool:
        async def wait() -> bool:
            try:
                async with asyncio.timeout(timeout):
                    return await self._real.wait()
            except TimeoutError:
                return False

        return bool(run(wait()))


class Store(Owner):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._real = AsyncStore(*args, **kwargs)
        run(self._real.__aenter__())

    @property
    def activity(self) -> Activity:
        return Activity(self._real.activity)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        with _entered(self._real.transaction()) as connection:
            yield Connection(connection)

    def _run(self, call: Any) -> Any:
        return run(self._real._run(call))


class MessageBus(Owner):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._real = AsyncMessageBus(*args, **kwargs)
        run(self._real.__aenter__())

    @property
    def store(self) -> Store:
        store = Store.__new__(Store)
        store._real = self._real.store
        return store

    @property
    def activity(self) -> Activity:
        return Activity(self._real.activity)

    @functools.wraps(AsyncMessageBus.unacked)
    def unacked(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return _each(self._real.unacked(*args, **kwargs))

    @functools.wraps(AsyncMessageBus.transaction)
    @contextmanager
    def transaction(self) -> Iterator[Any]:
        with _entered(self._real.transaction()) as connection:
            yield Connection(connection)

    @functools.wraps(AsyncMessageBus.admit)
    def admit(self, *args: Any, **kwargs: Any) -> Turn:
        return Turn(run(self._real.admit(*args, **{key: _real(value) for key, value in kwargs.items()})))

    @functools.wraps(AsyncMessageBus.turn)
    @contextmanager
    def turn(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with _entered(self._real.turn(*args, **kwargs)) as turn:
            yield Turn(turn)


class Turn:
    """An AsyncTurn with the methods of a Turn."""

    def __init__(self, real: AsyncTurn) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __repr__(self) -> str:
        return repr(self._real)

    @contextmanager
    def step(self, name: str, **kwargs: Any) -> Iterator[Any]:
        given = kwargs.get("conn")
        with _entered(self._real.step(name, **{key: _real(value) for key, value in kwargs.items()})) as step:
            yield Step(step, given or Connection(step.conn))


class Step:
    def __init__(self, real: AsyncStep, conn: Any) -> None:
        self._real = real
        self.conn = conn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Doorbell(Owner):
    def __init__(self, bus: MessageBus, handle: str, *, match: Callable[[Any], Any] | None = None, **kwargs: Any) -> None:
        self._serve: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = threading.Lock()
        self._match = match
        self._real = AsyncDoorbell(bus._real, handle, match=self._matches if match else None, **kwargs)
        run(self._real.arm())

    async def _matches(self, message: Any) -> Any:
        """Call `match` in the thread that waits, as the sync shell does."""
        here = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = here.create_future()

        def call() -> None:
            try:
                result = self._match(message)
            except BaseException as exc:
                here.call_soon_threadsafe(answer.set_exception, exc)
            else:
                here.call_soon_threadsafe(answer.set_result, result)

        self._serve.put(call)
        return await answer

    @functools.wraps(AsyncDoorbell.wait)
    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self._match is None:
            return run(self._real.wait(*args, **kwargs))
        with self._waiting:
            return run(self._real.wait(*args, **kwargs), self._serve)


_copy_public_names(Store, AsyncStore)
_copy_public_names(MessageBus, AsyncMessageBus)
_copy_public_names(Doorbell, AsyncDoorbell)
_copy_public_names(Turn, AsyncTurn)


def _each(items: Any) -> Iterator[Any]:
    while True:
        try:
            yield run(items.__anext__())
        except StopAsyncIteration:
            return


@contextmanager
def _entered(manager: Any) -> Iterator[Any]:
    value = run(manager.__aenter__())
    try:
        yield value
    except BaseException as exc:
        if not run(manager.__aexit__(type(exc), exc, exc.__traceback__)):
            raise
    else:
        run(manager.__aexit__(None, None, None))


class Connection:
    """A psycopg.AsyncConnection with the methods of a psycopg.Connection."""

    def __init__(self, real: psycopg.AsyncConnection[Any]) -> None:
        object.__setattr__(self, "_real", real)

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Connection:
        factories = {psycopg.ClientCursor: psycopg.AsyncClientCursor, psycopg.RawCursor: psycopg.AsyncRawCursor}
        if "cursor_factory" in kwargs:
            kwargs["cursor_factory"] = factories[kwargs["cursor_factory"]]
        return cls(run(psycopg.AsyncConnection.connect(*args, **kwargs)))

    def execute(self, *args: Any, **kwargs: Any) -> Cursor:
        return Cursor(run(self._real.execute(*args, **kwargs)))

    @contextmanager
    def transaction(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with _entered(self._real.transaction(*args, **kwargs)) as transaction:
            yield transaction

    def notifies(self, **kwargs: Any) -> Iterator[Any]:
        return _each(self._real.notifies(**kwargs))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return (
            (lambda *args, **kwargs: run(_call(lambda: value(*args, **kwargs)))) if inspect.iscoroutinefunction(value) else value
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("isolation_level", "autocommit", "read_only"):
            run(getattr(self._real, f"set_{name}")(value))
        else:
            setattr(self._real, name, value)


class Cursor:
    def __init__(self, real: psycopg.AsyncCursor[Any]) -> None:
        self._real = real

    def fetchone(self) -> Any:
        return run(self._real.fetchone())

    def fetchall(self) -> Any:
        return run(self._real.fetchall())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

"""One call in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def background(function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Call `function` in a daemon thread. `.result(timeout)` gives what it returns or raises what it raised."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future

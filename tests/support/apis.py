"""The shells under test. Behaviour tests are written against an `Api`, so that each of them can run the whole suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Api:
    """The names of one shell, all of them callable from a plain thread."""

    name: str
    MessageBus: Any
    Store: Any
    Doorbell: Any


def _sync() -> Api:
    from doorbell_postgres import Doorbell, MessageBus, Store

    return Api("sync", MessageBus, Store, Doorbell)


def _aio() -> Api:
    from support import aio

    return Api("aio", aio.MessageBus, aio.Store, aio.Doorbell)


APIS = {"aio": _aio, "sync": _sync}


def open_api(name: str) -> Api:
    """The shell called `name`. Child processes call this too: an Api itself does not travel."""
    return APIS[name]()

"""The two shells are one API: the same names, parameters and words, but for `await`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from doorbell_postgres import Doorbell, MessageBus, Step, Store, Turn, aio

PAIRS = [
    (MessageBus, aio.AsyncMessageBus),
    (Store, aio.AsyncStore),
    (Doorbell, aio.AsyncDoorbell),
    (Turn, aio.AsyncTurn),
    (Step, aio.AsyncStep),
]
# What only a shell without I/O in its constructor needs, and what only the code around a store sees of it.
ONLY_SYNC = {"Store": {"listener"}}
ONLY_ASYNC = {"Doorbell": {"arm"}, "Store": {"opened", "state", "tell_activity"}}
# Returned at once, to be entered or iterated.
NOT_AWAITED = {"transaction", "turn", "step", "unacked", "check_fork", "check_usable"}


def public(cls: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


METHODS = [
    pytest.param(sync, asynchronous, name, id=f"{sync.__name__}.{name}")
    for sync, asynchronous in PAIRS
    for name, value in public(sync).items()
    if inspect.isfunction(value)
]


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS)
def test_both_shells_have_the_same_names(sync: type, asynchronous: type) -> None:
    one, other = public(sync).keys(), public(asynchronous).keys()
    assert one - other <= ONLY_SYNC.get(sync.__name__, set())
    assert other - one <= ONLY_ASYNC.get(sync.__name__, set()) | {"activity"}
    assert asynchronous.__name__ == f"Async{sync.__name__}"


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS)
def test_both_shells_are_made_with_the_same_parameters(sync: type, asynchronous: type) -> None:
    assert parameters(sync) == parameters(asynchronous)


@pytest.mark.parametrize(("sync", "asynchronous", "name"), METHODS)
def test_a_method_takes_the_same_parameters_in_both_shells(sync: type, asynchronous: type, name: str) -> None:
    assert parameters(getattr(sync, name)) == parameters(getattr(asynchronous, name))


@pytest.mark.parametrize(("sync", "asynchronous", "name"), METHODS)
def test_a_method_is_awaited_in_the_async_shell(sync: type, asynchronous: type, name: str) -> None:
    assert inspect.iscoroutinefunction(getattr(asynchronous, name)) is (name not in NOT_AWAITED)


@pytest.mark.parametrize(("sync", "asynchronous", "name"), METHODS)
def test_a_method_says_in_both_shells_what_it_does(sync: type, asynchronous: type, name: str) -> None:
    """Not word for word, but where one has words the other has."""
    assert bool(inspect.getdoc(getattr(sync, name))) is bool(inspect.getdoc(getattr(asynchronous, name)))
    assert sync.__doc__
    assert asynchronous.__doc__


@pytest.mark.parametrize("name", [name for name, value in public(MessageBus).items() if inspect.isfunction(value)])
def test_every_method_of_a_bus_says_what_it_does(name: str) -> None:
    assert inspect.getdoc(getattr(aio.AsyncMessageBus, name))


def test_the_async_names_are_exported() -> None:
    assert set(aio.__all__) == {asynchronous.__name__ for _, asynchronous in PAIRS}

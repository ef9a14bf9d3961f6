"""The other end of support.processes: takes a function's name and arguments, runs it, sends back what it returns."""

from __future__ import annotations

import importlib
import operator
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


class Pipe:
    """What a worker function gets as its first argument."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: Any) -> None:
        self._connection.send(("said", value))

    def recv(self) -> Any:
        return self._connection.recv()


def main() -> None:
    with Connection(int(sys.argv[1])) as connection:
        module, name, args = connection.recv()
        try:
            function = operator.attrgetter(name)(importlib.import_module(module))
            result = function(Pipe(connection), *args)
        except BaseException as error:
            text = traceback.format_exc()
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                connection.send(("raised", (text, None)))
            else:
                connection.send(("raised", (text, error)))
        else:
            connection.send(("returned", result))


if __name__ == "__main__":
    main()

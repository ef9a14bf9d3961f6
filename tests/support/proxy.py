"""A TCP proxy of the tests' own in front of a Postgres: what a network does to connections, done on command.

It forwards to wherever the DSN leads, a unix socket included, and is itself reached over TCP. Freezing keeps sockets
open and moves no byte: to both ends that is a peer which has silently gone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class _Link:
    """One connection through the proxy: two sockets, and a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, *, frozen: bool) -> None:
        self._proxy = proxy
        self._client = client
        self._server: socket.socket | None = None
        self._open = threading.Event()
        self._gone = False
        self._dropped = False
        self._swallow: threading.Event | None = None
        self._threads = [threading.Thread(target=self._up, daemon=True)]
        if not frozen:
            self._open.set()
        self._threads[0].start()

    def freeze(self) -> None:
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def drop(self) -> None:
        self._dropped = True
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Close both ends, and wait until nothing of this link is left."""
        self._gone = True
        self._open.set()
        self._hang_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)
        for end in (self._client, self._server):
            if end is not None:
                end.close()

    def _hang_up(self) -> None:
        for end in (self._client, self._server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _up(self) -> None:
        with contextlib.suppress(OSError):
            self._open.wait()
            if not self._gone:
                self._server = self._proxy.dial()
                down = threading.Thread(target=self._down, daemon=True)
                self._threads.append(down)
                down.start()
                while data := self._client.recv(1 << 16):
                    self._proxy.requests.append((time.monotonic(), len(data)))
                    swallow = self._proxy.to_be_lost(data)
                    self._swallow = swallow or self._swallow
                    if not self._pass(data, self._server):
                        break
        self._hang_up()

    def _down(self) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):
            while data := self._server.recv(1 << 16):
                if self._swallow is not None:
                    self._swallow.set()
                    break
                if not self._pass(data, self._client):
                    break
        if not self._dropped:
            self._hang_up()

    def _pass(self, data: bytes, to: socket.socket) -> bool:
        if self._proxy.latency:
            time.sleep(self._proxy.latency)
        self._open.wait()
        if self._gone:
            return False
        to.sendall(data)
        return True


class Proxy:
    """Listens on a port of 127.0.0.1 and forwards to the server of `dsn`; `.dsn` leads through it.

    `latency`: seconds that each piece of data is held, in each direction.
    """

    def __init__(self, dsn: str) -> None:
        to = conninfo_to_dict(dsn)
        host, port = str(to.get("host") or to.get("hostaddr") or "localhost"), int(to.get("port") or 5432)
        self._upstream: Any = str(Path(host) / f".s.PGSQL.{port}") if host.startswith("/") else (host, port)
        self.latency = 0.0
        self.requests: list[tuple[float, int]] = []
        """(time.monotonic(), bytes) of each piece that a client has sent: one for each statement and each round trip."""
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._hang_new = False
        self._lost: tuple[bytes, threading.Event] | None = None
        self._listener: socket.socket | None = None
        self._port = 0
        self._thread: threading.Thread | None = None
        self.accept()
        to.pop("hostaddr", None)
        self.dsn = make_conninfo(**to | {"host": "127.0.0.1", "port": self._port, "sslmode": "disable"})

    # -- what can happen to a network ---------------------------------------------------------------------------------

    def freeze(self, *, since: int = 0) -> None:
        """Established connections carry nothing more, all or those after the first so many; new ones work."""
        with self._lock:
            for link in self._links[since:]:
                link.freeze()

    def drop(self) -> None:
        """End every connection for the server; clients hear of it when they next send something. New ones work."""
        with self._lock:
            for link in self._links:
                link.drop()

    def freeze_all(self) -> None:
        """Established connections carry nothing more; new ones are accepted and never answered."""
        self._hang_new = True
        self.freeze()

    def thaw(self, *, resume: bool = True) -> None:
        """New connections work. The frozen ones go on where they stood, or else stay silent for ever."""
        self._hang_new = False
        if resume:
            with self._lock:
                for link in self._links:
                    link.thaw()

    def cut(self) -> None:
        """End every connection; new ones work."""
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.cut()

    def refuse(self) -> None:
        """New connections are refused, as by a host where nothing listens."""
        listener, self._listener = self._listener, None
        if listener is not None and self._thread is not None:
            self._thread.join(5)
            listener.close()

    def accept(self) -> None:
        """Listen, on the same port as before."""
        listener = socket.create_server(("127.0.0.1", self._port), backlog=128)
        listener.settimeout(0.02)
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="proxy", daemon=True)
        self._thread.start()

    def lose_answer_to(self, needle: bytes) -> threading.Event:
        """Once: pass on what a client sends with `needle` in it, and when the server answers, cut instead.

        The event is set when that has happened.
        """
        happened = threading.Event()
        self._lost = (needle, happened)
        return happened

    # -- for links ----------------------------------------------------------------------------------------------------

    def dial(self) -> socket.socket:
        if isinstance(self._upstream, tuple):
            return socket.create_connection(self._upstream)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self._upstream)
        except OSError:
            server.close()
            raise
        return server

    def to_be_lost(self, data: bytes) -> threading.Event | None:
        with self._lock:
            if self._lost is None or self._lost[0] not in data:
                return None
            happened, self._lost = self._lost[1], None
            return happened

    @property
    def established(self) -> int:
        """How many connections clients have made since the last cut, those that have ended included."""
        return len(self._links)

    def _serve(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            client.settimeout(None)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._links.append(_Link(self, client, frozen=self._hang_new))

    def close(self) -> None:
        self.refuse()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

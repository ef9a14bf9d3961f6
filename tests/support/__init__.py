"""What the tests share: a server, the shells under test, real processes, and waiting without sleeping."""

from support import workers
from support.apis import APIS, Api, open_api
from support.processes import Processes, Worker, run_script
from support.server import TestServer, choose
from support.threads import background
from support.waiting import backends, bell_is_waiting, eventually, scanned, waiting_in_database

__all__ = [
    "APIS",
    "Api",
    "Processes",
    "TestServer",
    "Worker",
    "backends",
    "background",
    "bell_is_waiting",
    "choose",
    "eventually",
    "open_api",
    "run_script",
    "scanned",
    "waiting_in_database",
    "workers",
]

"""The async shell: the names of the sync one with `await`, on asyncio."""

from doorbell_postgres.aio.bus import AsyncMessageBus
from doorbell_postgres.aio.store import AsyncStore
from doorbell_postgres.aio.turns import AsyncStep, AsyncTurn
from doorbell_postgres.aio.waiter import AsyncDoorbell

__all__ = ["AsyncDoorbell", "AsyncMessageBus", "AsyncStep", "AsyncStore", "AsyncTurn"]

"""Object store in memory, in place of obstore's calls: a seed withholds, fails, repeats and delays
them, and kills the process that makes one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.virtual_clock import VirtualClock


class Killed(BaseException):
    """End of a process: its calls do nothing from now on."""


class StoredObject(NamedTuple):
    data: bytes
    modified_at: float


class Turns:
    """Turns of actors, one before each call; the seed chooses the next actor."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._parked: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._parked.append(turn)
        await turn

    def next(self) -> bool:
        """Give a turn; return False where nobody waits for one."""
        if not self._parked:
            return False
        turn = self._parked.pop(self.rng.randrange(len(self._parked)))
        if not turn.done():
            turn.set_result(None)
        return True


class Life:
    """One process, which a call may end."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.dead = False
        self.deadly = 0.0  # share of the calls that kill

    async def step(self) -> None:
        """Wait for a turn. Raises Killed."""
        self.check()
        await self.turns.wait()
        self.check()
        if self.turns.rng.random() < self.deadly:
            self.dead = True
            self.check()

    def check(self) -> None:
        if self.dead:
            raise Killed


class WildStore:
    """Objects of one bucket, shared by the processes that use it."""

    def __init__(self, rng: random.Random, clock: VirtualClock) -> None:
        self.rng, self.clock = rng, clock
        self.objects: dict[str, StoredObject] = {}
        self.wild = 0.0  # share of the calls that go wrong
        self.late: list[tuple[str, bytes]] = []  # writes that arrive once more, later
        self.signed: list[str] = []  # keys whose URLs a volunteer holds

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = StoredObject(data, self.clock.now())

    def repeat(self) -> None:
        """Deliver a write once more, as a proxy between a client and the store may."""
        if self.late:
            self.put(*self.late.pop(self.rng.randrange(len(self.late))))

    def of(self, life: Life) -> WildCalls:
        return WildCalls(self, life)


class WildCalls:
    """The functions of obstore that the product calls, for one process."""

    def __init__(self, store: WildStore, life: Life) -> None:
        self._store, self._life = store, life

    async def _call(self, method: str, key: str) -> bool:
        """Return True where the answer is lost after the call was done."""
        store = self._store
        await self._life.step()
        if store.rng.random() >= store.wild:
            return False
        fault = store.rng.choice(("refuse", "lose", "hide"))
        if fault == "refuse":
            raise OSError(f"performing {method} http: status code: 503")
        if fault == "hide" and method != "PUT":
            raise FileNotFoundError(f"performing {method} http: 404")
        return fault == "lose"

    def _answer(self, lost: bool) -> None:
        self._life.check()
        if lost:
            raise OSError("the connection was closed")

    def _object(self, key: str) -> StoredObject:
        if key not in self._store.objects:
            raise FileNotFoundError("performing GET http: 404")
        return self._store.objects[key]

    async def put_async(self, store: object, key: str, data: Path | bytes, **_: Any) -> None:
        lost = await self._call("PUT", key)
        content = data.read_bytes() if isinstance(data, Path) else data
        self._store.put(key, content)
        if self._store.rng.random() < self._store.wild and key.startswith("uploads/"):
            self._store.late.append((key, content))
        self._answer(lost)

    async def copy_async(self, store: object, key: str, to: str) -> None:
        lost = await self._call("PUT", key)
        self._store.put(to, self._object(key).data)
        self._answer(lost)

    async def delete_async(self, store: object, key: str) -> None:
        lost = await self._call("DELETE", key)
        self._store.objects.pop(key, None)
        self._answer(lost)

    async def head_async(self, store: object, key: str) -> dict[str, int]:
        lost = await self._call("HEAD", key)
        size = len(self._object(key).data)
        self._answer(lost)
        return {"size": size}

    async def get_async(self, store: object, key: str, options: Any) -> WildReply:
        lost = await self._call("GET", key)
        start, stop = options["range"]
        data = self._object(key).data[start:stop]
        return WildReply(data[: len(data) // 2] if lost else data, lost)

    async def sign_async(self, store: object, method: str, key: str, _: object) -> str:
        self._life.check()
        if method == "PUT":
            self._store.signed.append(key)
        return key

    async def list(self, store: object, prefix: str | None) -> AsyncIterator[list[Any]]:
        await self._call("GET", prefix or "")
        for key, item in sorted(self._store.objects.items()):
            if key.startswith(prefix or ""):
                modified = datetime.fromtimestamp(item.modified_at, UTC)
                yield [{"path": key, "size": len(item.data), "last_modified": modified}]


class WildReply(NamedTuple):
    """Body of a reply, which may be cut off."""

    data: bytes
    cut: bool

    async def stream(self, min_chunk_size: int) -> AsyncIterator[bytes]:
        yield self.data
        if self.cut:
            raise OSError("the connection was closed")

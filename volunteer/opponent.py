"""Opponent in a game: a version of a run, downloaded and verified, on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import BadRequest, InvalidFrame
from shared.protocol import endpoints
from shared.protocol.versions import VersionManifest
from shared.sentences import Sentence
from shared.tensors.frame import torch_tensors
from shared.workloads.base import load
from shared.workloads.declaration import refusal
from shared.workloads.games import BoardAnalysis, Games, MoveReply, Opponent
from volunteer.net.api import Api
from volunteer.net.transfers import Transfers
from volunteer.storage.blob_cache import Cache
from volunteer.storage.manifests import verified_manifest

CACHE_BYTES = 2 << 30

T = TypeVar("T")


class SeatedOpponent(msgspec.Struct, frozen=True, kw_only=True):
    """Opponent that is ready to play, and the board's rules."""

    run: str
    version: int
    newest: int  # newest version of the run
    size: int  # side of the board
    win: int  # stones in a row


class VersionOpponent:
    """Opponent played by a version of one run. Torch runs on a thread of its own, so that the
    screen never waits for it.
    """

    def __init__(
        self,
        api: Api,
        run: str,
        *,
        public_key: str,
        enabled: Sequence[str],
        directory: Path,
        threads: int = 1,
    ) -> None:
        self._api = api
        self._run = run
        self._public_key = public_key
        self._enabled = enabled
        self._threads = threads
        self._transfers = Transfers(api, Cache(directory, CACHE_BYTES))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rival")
        self._opponent: Opponent | None = None

    async def sit(self, version: int | None = None) -> SeatedOpponent:
        """Load a version as the opponent, by default the newest. Raises NotFound, BadRequest."""
        newest = verified_manifest(
            await self._api.query(endpoints.LATEST, run=self._run), self._public_key
        )
        manifest = newest
        if version is not None and version != newest.version:
            query = self._api.query(endpoints.VERSION, run=self._run, version=version)
            manifest = verified_manifest(await query, self._public_key)
        if {manifest.run, newest.run} != {self._run}:
            raise InvalidFrame(Sentence("the coordinator sent the manifest of another run"))
        workload = load(manifest.workload, self._enabled)
        if why := refusal(workload.declaration.output, "play", self._run):
            raise BadRequest(why)
        games = workload.experience
        assert isinstance(games, Games)  # the declaration says that the workload plays
        path = await self._transfers.fetch(manifest.weights, lambda _: None)
        self._opponent = await self._on_thread(lambda: self._read(manifest, path))
        size, win = games.rules(manifest.config)
        return SeatedOpponent(
            run=self._run, version=manifest.version, newest=newest.version, size=size, win=win
        )

    def look(self, moves: Sequence[int]) -> BoardAnalysis:
        """Return the position after `moves`. Raises BadRequest if a move is illegal or no opponent
        is loaded.
        """
        return self._seated().look(moves)

    async def reply(self, moves: Sequence[int], level: int) -> MoveReply:
        """Return the version's move in a position, and how it evaluates the position.

        Raises BadRequest if the game is over or no opponent is loaded.
        """
        opponent = self._seated()
        return await self._on_thread(lambda: opponent.reply(moves, level))

    def close(self) -> None:
        """Close the thread; a running move is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _seated(self) -> Opponent:
        if self._opponent is None:
            raise BadRequest(Sentence("nobody sits at the board yet"))
        return self._opponent

    def _read(self, manifest: VersionManifest, path: Path) -> Opponent:
        """Load the network, on the opponent's thread."""
        import torch

        torch.set_num_threads(self._threads)
        workload = load(manifest.workload, self._enabled)
        games = workload.experience
        assert isinstance(games, Games)  # `sit` has checked this
        weights = torch_tensors(path, workload.schema(manifest.config))
        return games.opponent(manifest.config, weights)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

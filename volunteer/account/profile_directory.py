"""Directory of the profile on this host: an identity for each joined coordinator.

    <profile>/current            names the coordinator in use
    <profile>/lock               see `instance_lock`
    <profile>/control.json       address of the running instance
    <profile>/last-look.json     figures that the owner saw last on the screen
    <profile>/<coordinator>/     identity.json, memory.json, outbox/, tasks/, receipts/,
                                 gifts/ and members/ of one coordinator

The identity, with its secret, is on disk before it is sent to anyone, so a lost reply never makes a
second account.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path

import msgspec

from shared.errors import Configuration, StorageFull
from shared.files.deletions import delete_file
from shared.files.text_file import read_text
from shared.proofs.signing import digest
from shared.protocol.accounts import Benchmark, ServerInfo
from shared.protocol.contributions import Verdict
from shared.protocol.inference import GiveRequest
from shared.sentences import Sentence
from volunteer.control.model_step import ModelStep
from volunteer.control.shortage import Shortage
from volunteer.files import (
    private_directory,
    read_record,
    set_aside,
    write_record,
    write_whole,
)
from volunteer.net.tls import Address

VERDICTS_KEPT = 200

log = logging.getLogger(__name__)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Account at one coordinator, with its secret: never shown or logged."""

    url: str
    tls_pin: str
    public_key: str  # key of the coordinator, hex; pinned at the first contact
    fingerprint: str
    server: str  # name of the server
    volunteer_id: str
    worker_id: str
    secret: str
    nickname: str
    code: str = ""  # invite or link code, until it is used
    registered: bool = False

    @property
    def token(self) -> str:
        return f"{self.worker_id}.{self.secret}"

    @property
    def address(self) -> Address:
        """Return the coordinator's address, and the key it must prove before it gets the secret."""
        return Address(url=self.url, tls_pin=self.tls_pin, public_key=self.public_key)


class ProfileState(msgspec.Struct, frozen=True, kw_only=True):
    """State kept between two starts, without secrets."""

    consents: tuple[str, ...] = ()  # runs whose licence was accepted
    news_until: int = 0  # position up to which verdicts were read
    ordered_at: float = 0.0  # time of the last order from another machine of the account
    verdicts: tuple[Verdict, ...] = ()  # newest last
    benchmarks: tuple[Benchmark, ...] = ()
    torch: str = ""  # version that the benchmarks were made with
    steps: tuple[ModelStep, ...] = ()  # measured steps of the runs' own models
    shortages: tuple[Shortage, ...] = ()  # models that ran out of memory, by run and device
    tasks: int = 0  # tasks ever submitted
    read: tuple[int, ...] = ()  # read announcements that may still be valid
    show_name: bool | None = None  # change of `public` not yet sent to the coordinator


class Home:
    """Directory of one coordinator inside a profile."""

    def __init__(self, path: Path) -> None:
        self.path = private_directory(path)
        self.outbox = private_directory(path / "outbox")
        self.tasks = private_directory(path / "tasks")
        self.receipts = path / "receipts"  # made with the first receipt
        self.own_data = path / "members"  # made with the first own data
        self._gifts = path / "gifts"  # gifts without an answer; made with the first gift
        self._memory = self._read_memory()

    @property
    def memory(self) -> ProfileState:
        return self._memory

    def remember(self, **changes: object) -> None:
        """Change the memory and store it; if the disk is full, the next change stores it."""
        self._memory = msgspec.structs.replace(self._memory, **changes)
        try:
            write_record(self.path / "memory.json", self._memory)
        except StorageFull as error:
            log.warning("not remembered: %s", error.message)

    def remember_verdicts(self, verdicts: tuple[Verdict, ...], until: int) -> None:
        """Add verdicts; a later verdict on the same contribution replaces the earlier verdict."""
        by_contribution = {verdict.contribution: verdict for verdict in self._memory.verdicts}
        for verdict in verdicts:
            by_contribution.pop(verdict.contribution, None)
            by_contribution[verdict.contribution] = verdict
        newest = tuple(by_contribution.values())[-VERDICTS_KEPT:]
        self.remember(verdicts=newest, news_until=max(until, self._memory.news_until))

    def gift(self, to: str, amount_micro: int) -> tuple[GiveRequest, bool]:
        """Return the request of a gift, stored before it is sent, and True if the same gift was
        sent before without an answer: it keeps its id, by which the coordinator pays it once.
        """
        path = self._gift_file(to, amount_micro)
        if earlier := read_record(path, GiveRequest):
            return earlier, True
        request = GiveRequest(id=secrets.token_hex(16), to=to, amount_micro=amount_micro)
        private_directory(self._gifts)
        write_record(path, request, durable=True)
        return request, False

    def forget_gift(self, request: GiveRequest) -> None:
        """Delete the request of a gift that was answered."""
        delete_file(self._gift_file(request.to, request.amount_micro), "settled")

    def _gift_file(self, to: str, amount_micro: int) -> Path:
        return self._gifts / f"{digest(f'{amount_micro} {to}'.encode())[:32]}.json"

    def _read_memory(self) -> ProfileState:
        path = self.path / "memory.json"
        try:
            return read_record(path, ProfileState) or ProfileState()
        except Configuration:
            set_aside(path)  # work can begin without it
            return ProfileState()


class Profile:
    """Profile of this host: its accounts, and the account in use."""

    def __init__(self, path: Path) -> None:
        self.path = private_directory(path)
        self.endpoint = path / "control.json"

    def current(self) -> Identity | None:
        """Return the identity in use; None if there is no account. Raises Configuration when the
        identity is damaged.
        """
        try:
            slug = read_text(self.path / "current").strip()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            slug = ""
        return self._load(slug)

    @property
    def joined(self) -> bool:
        """Return True if there is an account, even an unreadable one."""
        return (self.path / "current").exists()

    def identity_of(self, server: ServerInfo) -> Identity | None:
        """Return the stored identity for this coordinator; None if there is no such identity."""
        return self._load(_slug(server.public_key))

    def use(self, identity: Identity) -> None:
        """Store an identity durably and make it the current one. An account that works stays the
        current one until the other is registered too: its coordinator may refuse it.
        """
        slug = _slug(identity.public_key)
        home = private_directory(self.path / slug)
        write_record(home / "identity.json", identity, durable=True)
        if identity.registered or not self._works:
            write_whole(self.path / "current", slug.encode(), durable=True)

    @property
    def _works(self) -> bool:
        """Return True if the current account is registered."""
        try:
            identity = self.current()
        except Configuration:
            return False
        return identity is not None and identity.registered

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts on earlier contributions, newest last; () if they are unreadable."""
        try:
            identity = self.current()
        except Configuration:
            return ()  # a damaged file is reported when work begins
        return self.home(identity).memory.verdicts if identity is not None else ()

    def home(self, identity: Identity) -> Home:
        return Home(self.path / _slug(identity.public_key))

    def _load(self, slug: str) -> Identity | None:
        if not re.fullmatch("[0-9a-f]{16}", slug):
            raise Configuration(
                Sentence("{path} is damaged: join again with your link", path=self.path / "current")
            )
        path = self.path / slug / "identity.json"
        if path.exists() and os.name == "posix" and path.stat().st_mode & 0o077:
            raise Configuration(
                Sentence("others can read your secret: chmod 600 {path}", path=path)
            )
        try:
            return read_record(path, Identity)
        except Configuration as error:
            raise Configuration(
                Sentence(
                    "{error}; move that file away, ask your organiser for a link of your own, and "
                    "join with it",
                    error=error.message,
                )
            ) from error


def new_identity(
    server: ServerInfo, *, url: str, tls_pin: str, nickname: str, code: str
) -> Identity:
    """Return a new account; its ids and its 256-bit secret are made on this machine. Without a
    nickname, but with a code, the coordinator gives it the name of its invitation.
    """
    return Identity(
        url=url,
        tls_pin=tls_pin,
        public_key=server.public_key,
        fingerprint=server.fingerprint,
        server=server.name,
        volunteer_id=secrets.token_hex(16),
        worker_id=secrets.token_hex(16),
        secret=secrets.token_hex(32),
        nickname=nickname or ("" if code else f"volunteer-{secrets.token_hex(3)}"),
        code=code,
    )


def _slug(public_key: str) -> str:
    return digest(public_key.encode())[:16]

"""Identity of a coordinator: name, key, address, organiser's token, public runs."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from coordinator.accounts.install_lines import installations, message
from coordinator.certificates import write_private
from coordinator.config import without_password
from coordinator.database import key_values, record
from coordinator.platform import Platform, PlatformService
from coordinator.storage.blobs import in_pool
from coordinator.ttl_cache import CachedValue
from shared.clock import machine_time
from shared.decoding import decode
from shared.errors import BadRequest, Configuration, Unavailable
from shared.network.links import JoinLink, bound_address, is_loopback
from shared.programs.wheel import Wheel, own_wheel
from shared.proofs.signing import SigningKey, fingerprint, identity_payload
from shared.protocol.accounts import RunInfo, ServerInfo, SignedWheel
from shared.protocol.protocol_version import PROTOCOL, PROTOCOL_MIN
from shared.protocol.transparency import RestorePayload, SignedRestore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database

ADMIN = "admin"  # name before the secret in the organiser's token
NONCE_CHARS_MAX = 64
RUNS_S = 1.0  # time for which the listing of the runs and the statement of a restore are reused


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Public address of the server, the base of join links."""

    url: str
    tls_pin: str = ""


class ServerIdentity(PlatformService):
    """Answers requests for the identity of this coordinator; makes its join links."""

    def __init__(self, on: Platform, listing: Callable[[], Awaitable[tuple[RunInfo, ...]]]) -> None:
        super().__init__(on)
        self._listing = CachedValue(listing, RUNS_S, on.clock)
        self._admin_hash = self._metrics_hash = b""  # fits no token until `load_tokens`
        self._restored = CachedValue(lambda: on.db.read(restore_statement), RUNS_S, on.clock)
        self.address = ServerAddress(url=on.settings.url or f"http://127.0.0.1:{on.settings.port}")

    async def load(self) -> None:
        """Read the address of the last server of this database."""
        if text := await self._db.read(lambda conn: key_values.get(conn, key_values.ADDRESS)):
            self.address = decode(text, ServerAddress)

    async def load_tokens(self) -> None:
        """Derive tokens from the key, write missing files. Raises Configuration for wrong files."""
        times = await self._db.read(lambda conn: key_values.get(conn, key_values.TOKENS))
        files = (self._settings.admin_token_file, self._settings.metrics_token_file)
        self._admin_hash, self._metrics_hash = (
            _token_hash(file, self._key.secret(f"{file.name} {times or 0}")) for file in files
        )

    async def set_address(self, address: ServerAddress) -> None:
        """Store the address of the server that starts, for join links that other processes print,
        and whether it admits strangers, for the runs that they create; record the settings that
        changed since the last start.
        """
        self.address = address
        text = msgspec.json.encode(address).decode()
        is_open = "yes" if self._settings.open else "no"

        def start(conn: Connection) -> None:
            key_values.put(conn, key_values.ADDRESS, text)
            key_values.put(conn, key_values.OPEN, is_open)
            self._log_settings(conn)

        await self._db.write(start)

    def _log_settings(self, conn: Connection) -> None:
        """Record each setting that differs from the last start's."""
        current = {
            name: without_password(value) if isinstance(value, str) and "://" in value else value
            for name, value in msgspec.structs.asdict(self._settings).items()
            if name != "constants"  # the organiser does not set these
        }
        before = key_values.get(conn, key_values.SETTINGS)
        if before is not None:
            logged = decode(before, dict[str, Any])
            for name in sorted(current.keys() | logged.keys()):
                former, value = logged.get(name), current.get(name)
                if former != value:
                    detail = {"from": former, "to": value}
                    at = self._clock.now()
                    record.append(conn, "organiser", "settings.change", name, detail, at)
        key_values.put(conn, key_values.SETTINGS, msgspec.json.encode(current).decode())

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the key that signs manifests."""
        return fingerprint(self._key.public_key)

    def link(self, code: str = "") -> JoinLink:
        """Return a join link to this coordinator."""
        address = self.address
        return JoinLink(
            url=address.url, fingerprint=self.fingerprint, tls_pin=address.tls_pin, code=code
        )

    async def message(self, link: str) -> list[str]:
        """Return the lines of a message that asks somebody to join by a link; [] if no other
        machine reaches the address.
        """
        if self.is_local:
            return []
        install, pinned = self._settings.install, bool(self.address.tls_pin)
        if not install and (wheel := await self.wheel()):
            install = installations(wheel, self.address.url, pinned=pinned)[0].lines[0].line
        return message(self._settings.name, link, install, pinned=pinned)

    @property
    def is_local(self) -> bool:
        """Return True if join links lead to the machine on which they are opened."""
        return is_loopback(urlsplit(self.address.url).hostname or "")

    def is_admin(self, token: str) -> bool:
        """Return True if this is the organiser's token."""
        return secrets.compare_digest(hashlib.sha256(token.encode()).digest(), self._admin_hash)

    def may_scrape(self, token: str) -> bool:
        """Return True if this is the metrics token or the organiser's."""
        token_hash = hashlib.sha256(token.encode()).digest()
        return secrets.compare_digest(token_hash, self._metrics_hash) or (
            token.startswith(f"{ADMIN}.") and self.is_admin(token.removeprefix(f"{ADMIN}."))
        )

    async def runs(self) -> tuple[RunInfo, ...]:
        """Return every run; the listing may be a second old."""
        return await self._listing.get()

    async def wheel(self) -> Wheel | None:
        """Return the wheel of this program, built on first use; None where the setting `install`
        replaces it, or the tree was never installed.
        """
        if self._settings.install:
            return None
        try:
            return await asyncio.to_thread(own_wheel)
        except Configuration:
            return None

    def _signed(self, wheel: Wheel) -> SignedWheel:
        unsigned = SignedWheel(
            name=wheel.name, sha256=wheel.sha256, size=len(wheel.data), signature=""
        )
        signature = self._key.sign(unsigned.signed.encode()).hex()
        return msgspec.structs.replace(unsigned, signature=signature)

    def _proof(self, nonce: str, at: str) -> str:
        """Return the signature that proves this coordinator's key and address, in hex; "" for an
        address of another server, which may only pass requests on.
        """
        if not nonce or at not in ("", bound_address(self.address.url, self.address.tls_pin)):
            return ""
        return self._key.sign(identity_payload(nonce, at)).hex()

    async def info(self, nonce: str = "", at: str = "") -> ServerInfo:
        """Return the public description of this coordinator; the runs may be a second old.

        Raises BadRequest for a nonce that is too long.
        """
        if len(nonce) > NONCE_CHARS_MAX:
            raise BadRequest(f"a nonce has at most {NONCE_CHARS_MAX} characters")
        wheel = await self.wheel()
        return ServerInfo(
            name=self._settings.name,
            software=software(),
            protocol=PROTOCOL,
            protocol_min=PROTOCOL_MIN,
            protocol_min_next=PROTOCOL_MIN,
            public_key=self._key.public_key.hex(),
            fingerprint=self.fingerprint,
            invite_only=self._settings.by_invitation,
            open=self._settings.open,
            proof_of_work_bits=self._settings.proof_of_work_bits if self._settings.open else 0,
            contact=self._settings.contact,
            now=machine_time(self._clock),
            restored=await self._restored.get(),
            store=self._blobs.public,
            mirrors=self._settings.mirror_urls,
            runs=await self._listing.get(),
            proof=self._proof(nonce, at),
            wheel=self._signed(wheel) if wheel else None,
            install=self._settings.install,
        )

    async def ping(self) -> None:
        """Query the database. Raises Unavailable when it does not answer."""
        if self._db.failed:
            raise Unavailable(self._db.failed, retry_after_s=60.0)
        await self._db.read(lambda conn: key_values.get(conn, key_values.ADDRESS))


def restore_statement(conn: Connection) -> SignedRestore | None:
    """Return the signed statement of the last restore; None without one."""
    text = key_values.get(conn, key_values.RESTORED)
    return decode(text, SignedRestore) if text else None


def restored_at(conn: Connection) -> float:
    """Return the time of the last signed statement of a restore; 0 without one."""
    signed = restore_statement(conn)
    return decode(signed.payload, RestorePayload).tree.at if signed else 0.0


@lru_cache(maxsize=1)
def software() -> str:
    """Return the version of the installed package; "0" in a tree that was never installed."""
    try:
        return version("volunteer")
    except PackageNotFoundError:
        return "0"


async def own_key(db: Database, file: Path) -> SigningKey:
    """Return a database's signing key, made for a new database. Raises Configuration if `file`
    is missing or holds another key.
    """
    key_of_database = await db.read(lambda conn: key_values.get(conn, key_values.KEY))

    def adopt(conn: Connection) -> str:
        if not (first := key_values.locked(conn, key_values.KEY)):
            first = fingerprint(SigningKey.load_or_create(file).public_key)
            key_values.put(conn, key_values.KEY, first)
        return first

    return await in_pool(_key_in_file, file, key_of_database or await db.write(adopt))


def _key_in_file(file: Path, owner_key: str) -> SigningKey:
    advice = f"copy signing.key from the data directory of one of its servers to {file}"
    if not file.exists():
        raise Configuration(
            f"the database belongs to the key {owner_key}, which is not here: {advice}"
        )
    key = SigningKey.load(file)
    if fingerprint(key.public_key) != owner_key:
        raise Configuration(
            f"{file} holds the key {fingerprint(key.public_key)}, but the database belongs to the "
            f"key {owner_key}: {advice}, or name another --database"
        )
    return key


def renew_tokens(conn: Connection) -> None:
    """Make the organiser's and the metrics token invalid; new files are written by a start."""
    times = int(key_values.locked(conn, key_values.TOKENS) or 0)
    key_values.put(conn, key_values.TOKENS, str(times + 1))


def _token_hash(path: Path, secret: bytes) -> bytes:
    """Return the SHA-256 of a secret's token, and write the token to `path` if it is missing.
    Raises Configuration.
    """
    token = secret.hex().encode()
    try:
        if not path.exists():
            write_private(path, token + b"\n")
        token_read = path.read_bytes().strip()
    except OSError as error:
        raise Configuration(f"{path} cannot be read: {error.strerror}") from error
    if not secrets.compare_digest(token_read, token):
        raise Configuration(
            f"{path} holds a token that is not this coordinator's: delete the file, and the next "
            "start writes the right one"
        )
    return hashlib.sha256(token).digest()

"""Becoming a volunteer of a coordinator: look at it without a secret, store an identity, then
register.
"""

from __future__ import annotations

import importlib.metadata
import secrets
from collections.abc import Callable

import msgspec

from shared.clock import Clock
from shared.errors import (
    BadSignature,
    InvalidName,
    Unauthorized,
    Unreachable,
    UpgradeRequired,
)
from shared.links import JoinLink, is_loopback
from shared.protocol.accounts import RegisterReply, RegisterRequest, ServerInfo
from shared.protocol.limits import PROTOCOL
from shared.signing import fits
from shared.workloads.base import installed
from volunteer.account.profile import Identity, Profile, new_identity
from volunteer.control.commands import Joined
from volunteer.machine.devices import hardware
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.retry import FOREVER
from volunteer.net.tls import Address
from volunteer.settings.settings import Settings
from volunteer.text import nobody_at

PATIENCE_S = 15.0
REGISTER_S = 60.0  # a crowd that joins at once is let in one after the other
NAMES_TRIED = 3

Connect = Callable[[Address, str], Client]  # address and token


def software() -> str:
    try:
        return importlib.metadata.version("volunteer")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def connector(clock: Clock) -> Connect:
    """Return how production connects; tests bring a transport of their own."""
    return lambda address, token: Client(address, clock=clock, token=token)


def check_server(server: ServerInfo, public_key: str) -> None:
    """Raises UpgradeRequired when it needs a newer version of us, BadSignature when it is not the
    one we joined.
    """
    if server.protocol_min > PROTOCOL:
        raise UpgradeRequired(
            f"the coordinator speaks version {server.protocol_min} and up, this is {PROTOCOL}: "
            "pipx upgrade volunteer"
        )
    if public_key and server.public_key != public_key:
        raise BadSignature(
            "the coordinator shows another key than when you joined: ask your organiser, and "
            "join again with a new link"
        )


async def probe(link: JoinLink, connect: Connect, patience_s: float = PATIENCE_S) -> ServerInfo:
    """Return who answers at a link.

    Raises BadSignature when it is not who the link names, Unreachable.
    """
    address = Address(url=link.url, tls_pin=link.tls_pin)
    client = connect(address, "")
    try:
        server = await Api(client).server(patience_s)
    except Unreachable as error:
        if is_loopback(address.host):
            raise Unreachable(nobody_at(link.url)) from error
        raise
    finally:
        await client.close()
    check_server(server, "")
    try:
        key = bytes.fromhex(server.public_key)
    except ValueError as error:
        raise BadSignature("the coordinator shows a key that is none") from error
    if link.fingerprint and not fits(key, link.fingerprint):
        raise BadSignature(
            "who answers at this address is not who your link names: ask your organiser for a "
            "new link"
        )
    return server


async def join(
    link: JoinLink,
    name: str,
    *,
    profile: Profile,
    settings: Settings,
    connect: Connect,
    patience_s: float = PATIENCE_S,
) -> Joined:
    """Make an account at the coordinator of a link, or go on with the one made before: it may be
    repeated.

    Raises BadSignature, Unreachable, InvalidName, Forbidden.
    """
    server = await probe(link, connect, patience_s)
    known = profile.known(server)
    if known is not None and known.registered and link.code and await _withdrawn(known, connect):
        known = None
    if known is not None:
        identity = msgspec.structs.replace(known, url=link.url, tls_pin=link.tls_pin)
        if not known.registered:
            identity = msgspec.structs.replace(
                identity, nickname=name or known.nickname, code=link.code
            )
    else:
        identity = new_identity(
            server, url=link.url, tls_pin=link.tls_pin, nickname=name, code=link.code
        )
    profile.use(identity)  # before anything is sent
    created = not identity.registered
    if created:
        named = bool(name)
        try:
            identity = await register(
                identity,
                profile=profile,
                settings=settings,
                connect=connect,
                named=named,
                patience_s=REGISTER_S,
            )
        except Unreachable as error:
            raise Unreachable(
                f"{error.message}: join again with the same link once the coordinator answers"
            ) from error
    return Joined(
        server=server.name,
        url=link.url,
        fingerprint=server.fingerprint,
        nickname=identity.nickname,
        created=created,
    )


async def register(
    identity: Identity,
    *,
    profile: Profile,
    settings: Settings,
    connect: Connect,
    named: bool = True,
    patience_s: float = FOREVER,
) -> Identity:
    """Tell the coordinator of a stored identity, under the same ids however often.

    Raises InvalidName, Forbidden, Unreachable.

    A name that was not chosen is replaced when it is taken.
    """
    client = connect(Address(url=identity.url, tls_pin=identity.tls_pin), "")
    spare = 0 if named else NAMES_TRIED
    try:
        while True:
            try:
                reply = await Api(client).register(_request(identity, settings), patience_s)
            except InvalidName:
                if spare == 0:
                    raise
                spare -= 1
                fresh = f"volunteer-{secrets.token_hex(4)}"
                identity = msgspec.structs.replace(identity, nickname=fresh)
                profile.use(identity)
            else:
                return _registered(identity, reply, profile)
    finally:
        await client.close()


def _registered(identity: Identity, reply: RegisterReply, profile: Profile) -> Identity:
    identity = msgspec.structs.replace(
        identity,
        volunteer_id=reply.volunteer_id,
        worker_id=reply.worker_id,
        nickname=reply.nickname,
        code="",
        registered=True,
    )
    profile.use(identity)
    return identity


def _request(identity: Identity, settings: Settings) -> RegisterRequest:
    return RegisterRequest(
        volunteer_id=identity.volunteer_id,
        worker_id=identity.worker_id,
        secret=identity.secret,
        nickname=identity.nickname,
        public=settings.public,
        code=identity.code,
        software=software(),
        hardware=hardware(),
        workloads=enabled(settings),
    )


async def _withdrawn(identity: Identity, connect: Connect) -> bool:
    """Return True if the coordinator no longer knows the secret, as after a reissue."""
    client = connect(Address(url=identity.url, tls_pin=identity.tls_pin), identity.token)
    try:
        await Api(client).me()
    except Unauthorized:
        return True
    finally:
        await client.close()
    return False


def enabled(settings: Settings) -> tuple[str, ...]:
    """Workloads that are installed and that the owner of this machine allows."""
    return tuple(name for name in sorted(installed()) if name in settings.workloads)

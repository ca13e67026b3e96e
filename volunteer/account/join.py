"""Joining a coordinator: probe it without sending a secret, store an identity, then register."""

from __future__ import annotations

import asyncio
import importlib.metadata
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from shared.clock import Clock
from shared.errors import (
    BadRequest,
    BadSignature,
    Configuration,
    InvalidName,
    Unauthorized,
    Unreachable,
)
from shared.network.links import JoinLink, bound_address, is_loopback
from shared.proofs.proof_of_work import solve, solved_probability
from shared.proofs.signing import (
    fingerprint_fits,
    identity_payload,
    is_whole_fingerprint,
    verify,
)
from shared.protocol import endpoints
from shared.protocol.accounts import RegisterReply, RegisterRequest, ServerInfo
from shared.protocol.protocol_version import check_server
from shared.sentences import Sentence
from shared.workloads.base import installed
from volunteer.account.profile_directory import Identity, Profile, new_identity
from volunteer.control.commands import Joined
from volunteer.machine.devices import hardware
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.reply_errors import ForeignReply
from volunteer.net.retry import FOREVER
from volunteer.net.tls import Address
from volunteer.settings.settings import Settings
from volunteer.text import nobody_at

REGISTER_S = 60.0  # long, since many joining machines are registered one by one
NAMES_TRIED = 3
CHALLENGES_TRIED = 3  # an expired challenge is replaced

Connect = Callable[[Address, str], Client]  # address and token
# Receives the bits of the proof of work and the probability of success so far.
Progress = Callable[[int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """Objects that joining a coordinator needs."""

    profile: Profile
    settings: Settings
    connect: Connect
    progress: Progress = lambda bits, done: None


def software() -> str:
    """Return the installed version of this program; "0" in a source tree."""
    try:
        return importlib.metadata.version("volunteer")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def connector(clock: Clock) -> Connect:
    """Return the function that makes a real client; tests pass another `Connect`."""
    return lambda address, token: Client(address, clock=clock, token=token)


async def probe(link: JoinLink, connect: Connect, patience_s: float = 0.0) -> ServerInfo:
    """Return the identity of the server at a link.

    Raises BadSignature if it is not the server that the link names, BadRequest for a damaged link,
    Configuration if no coordinator answers at its address, Unreachable, UpgradeRequired.
    """
    address = Address(url=link.url, tls_pin=link.tls_pin)
    question = {"nonce": secrets.token_hex(16), "at": bound_address(link.url, link.tls_pin)}
    client = connect(address, "")
    try:
        server = await Api(client).call(endpoints.SERVER, question, patience_s=patience_s)
    except ForeignReply as error:
        raise Configuration(
            Sentence(
                "no coordinator answers at {url} ({error}): is the address that of your link?",
                url=link.url,
                error=error.message,
            )
        ) from error
    except Unreachable as error:
        if is_loopback(address.host):
            raise Unreachable(nobody_at(link.url)) from error
        raise
    finally:
        await client.close()
    check_server(server.protocol, server.protocol_min)
    try:
        key = bytes.fromhex(server.public_key)
    except ValueError as error:
        sentence = Sentence(
            "the coordinator's key cannot be read: ask your organiser for a new link"
        )
        raise BadSignature(sentence) from error
    if link.fingerprint and not fingerprint_fits(key, link.fingerprint):
        if not is_whole_fingerprint(link.fingerprint):
            raise BadRequest(
                Sentence(
                    'the part "{name}" of the join link is damaged; copy the link whole',
                    name="key",
                )
            )
        raise BadSignature(
            Sentence(
                "another coordinator answers here than your link names: ask your organiser "
                "for a new link"
            )
        )
    if question["at"]:
        _check_address(link.url, key, question, server.proof)
    return server


def _check_address(url: str, key: bytes, question: Mapping[str, str], proof: str) -> None:
    """Raise BadSignature unless the owner of the key serves at this address: another server there
    could pass on what its owner answers, and keep the secret that it is sent next.
    """
    try:
        verify(key, identity_payload(question["nonce"], question["at"]), bytes.fromhex(proof))
    except (BadSignature, ValueError) as error:
        raise BadSignature(
            Sentence(
                "the coordinator that this link names does not serve at {url}: ask your organiser "
                "for a new link",
                url=url,
            )
        ) from error


async def join(link: JoinLink, name: str, enrolment: Enrolment, patience_s: float = 0.0) -> Joined:
    """Make an account at a link's coordinator, or use the existing one; the call may be repeated.

    Raises BadSignature, Unreachable, UpgradeRequired, InvalidName, Forbidden.
    """
    profile, connect = enrolment.profile, enrolment.connect
    server = await probe(link, connect, patience_s)
    previous = profile.identity_of(server)
    if (
        previous is not None
        and previous.registered
        and link.code
        and await _secret_is_unknown(previous, connect)
    ):
        previous = None
    if previous is not None:
        identity = msgspec.structs.replace(previous, url=link.url, tls_pin=link.tls_pin)
        if not previous.registered:
            identity = msgspec.structs.replace(
                identity, nickname=name or previous.nickname, code=link.code
            )
    else:
        identity = new_identity(
            server, url=link.url, tls_pin=link.tls_pin, nickname=name, code=link.code
        )
    profile.use(identity)  # stored before anything is sent
    created = not identity.registered
    if created:
        try:
            identity = await register(identity, enrolment, named=bool(name), patience_s=REGISTER_S)
        except Unreachable as error:
            raise Unreachable(
                Sentence(
                    "{error}: join again with the same link once the coordinator answers",
                    error=error.message,
                )
            ) from error
    return Joined(
        url=link.url,
        fingerprint=server.fingerprint,
        nickname=identity.nickname,
        server=server.name,
        created=created,
        own_data=tuple(
            run.name
            for run in server.runs
            if run.members is not None and run.state in ("running", "paused")
        ),
    )


async def register(
    identity: Identity,
    enrolment: Enrolment,
    *,
    named: bool = True,
    patience_s: float = FOREVER,
) -> Identity:
    """Register a stored identity and return it as registered; a repeated call uses the same ids.

    An open coordinator requires a proof of work from newcomers without a code. A name that no
    person chose (not `named`) is replaced by a random one if the coordinator refuses it. Raises
    InvalidName, Forbidden, BadRequest, Unreachable.
    """
    profile = enrolment.profile
    client = enrolment.connect(identity.address, "")
    names_left = 0 if named and identity.nickname else NAMES_TRIED
    challenges_left, proof = CHALLENGES_TRIED, NO_PROOF
    try:
        api = Api(client)
        while True:
            try:
                if not (identity.code or proof.challenge):
                    proof = await _proof(api, identity, enrolment.progress, patience_s)
                request = _request(identity, enrolment.settings, proof)
                reply = await api.call(endpoints.REGISTER, body=request, patience_s=patience_s)
            except InvalidName:
                if names_left == 0:
                    raise
                names_left -= 1
                fresh = f"volunteer-{secrets.token_hex(4)}"
                identity = msgspec.structs.replace(identity, nickname=fresh)
                profile.use(identity)
            except BadRequest:
                if not proof.challenge or challenges_left == 0:
                    raise
                challenges_left, proof = challenges_left - 1, NO_PROOF
            else:
                return _store_registration(identity, reply, profile)
    finally:
        await client.close()


@dataclass(frozen=True, slots=True)
class _WorkProof:
    """Challenge and its solution; both "" if no proof is required."""

    challenge: str = ""
    nonce: str = ""


NO_PROOF = _WorkProof()


async def _proof(api: Api, identity: Identity, progress: Progress, patience_s: float) -> _WorkProof:
    """Compute the proof of work that the coordinator requires of newcomers without a code.

    The search runs in a thread, which ends if the caller is cancelled.
    """
    server = await api.call(endpoints.SERVER, patience_s=patience_s)
    if not (server.open and server.proof_of_work_bits):
        return NO_PROOF
    newcomer = {"volunteer": identity.volunteer_id, "nickname": identity.nickname}
    challenge = await api.call(endpoints.CHALLENGE, newcomer, patience_s=patience_s)
    loop, over = asyncio.get_running_loop(), threading.Event()
    progress(challenge.bits, 0.0)

    def report_tries(count: int) -> bool:
        if not over.is_set():
            loop.call_soon_threadsafe(
                progress, challenge.bits, solved_probability(count, challenge.bits)
            )
        return not over.is_set()

    try:
        nonce = await asyncio.to_thread(solve, challenge.challenge, challenge.bits, report_tries)
    finally:
        over.set()
    progress(challenge.bits, 1.0)
    return _WorkProof(challenge.challenge, f"{nonce or 0:x}")


def _store_registration(identity: Identity, reply: RegisterReply, profile: Profile) -> Identity:
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


def _request(identity: Identity, settings: Settings, proof: _WorkProof) -> RegisterRequest:
    return RegisterRequest(
        volunteer_id=identity.volunteer_id,
        worker_id=identity.worker_id,
        secret=identity.secret,
        nickname=identity.nickname,
        code=identity.code,
        challenge=proof.challenge,
        nonce=proof.nonce,
        public=settings.public,
        software=software(),
        hardware=hardware(),
        workloads=enabled(settings),
    )


async def _secret_is_unknown(identity: Identity, connect: Connect) -> bool:
    """Return True if the coordinator does not know the secret any more, as after a reissue."""
    client = connect(identity.address, identity.token)
    try:
        await Api(client).query(endpoints.ME)
    except Unauthorized:
        return True
    finally:
        await client.close()
    return False


def enabled(settings: Settings) -> tuple[str, ...]:
    """Return the installed workloads that the owner of this machine allows."""
    return tuple(name for name in sorted(installed()) if name in settings.workloads)

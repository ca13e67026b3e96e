"""Methods for the coordinator's endpoints (`shared.protocol.endpoints`) that workers call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidFrame, Unavailable, VolunteerError
from shared.protocol import endpoints
from shared.protocol.accounts import (
    BenchmarkRequest,
    Challenge,
    Forfeited,
    LeaveRequest,
    LinkCode,
    MachineOrder,
    Me,
    RegisterReply,
    RegisterRequest,
    RunInfo,
    ServerInfo,
    SignedWheel,
    VisibilityRequest,
)
from shared.protocol.contributions import SubmitReply, SubmitRequest, UploadInfo, UploadRequest
from shared.protocol.endpoints import IMAGES, MODEL, Endpoint
from shared.protocol.heartbeat import HeartbeatReply, HeartbeatRequest
from shared.protocol.inference import (
    AnswerOffer,
    AnswerTokens,
    AnswerWork,
    Given,
    GiveRequest,
    ImageReply,
    ImageRequest,
    KeyInfo,
    KeyRequest,
    ModelCard,
    NewKey,
    UsageRow,
)
from shared.protocol.leases import (
    BeginReply,
    BeginRequest,
    ClaimReply,
    ClaimRequest,
    ReleaseRequest,
)
from shared.protocol.limits import LONG_POLL_S_MAX
from shared.protocol.transparency import SignedHead, SignedReceipt, TreeProof
from shared.protocol.versions import SignedManifest, VersionInfo
from shared.sentences import Sentence
from shared.workloads.base import DatasetManifest
from volunteer.net.client import ApiCall, Client
from volunteer.net.retry import FOREVER

ASK_S = 15.0  # patience of a request that a person waits for
SHORT_S = 5.0  # patience of a request that may fail without harm
HELD_S = 20.0  # longest delay of a long poll's reply after its wait

DRAW_S = 180.0  # patience of an image request: a version may have to be loaded first

CURSOR_CHARS_MAX = 64

T = TypeVar("T")
Body = msgspec.Struct | Callable[[], msgspec.Struct]


class Api:
    """Coordinator's endpoints as methods; requests that training needs are retried."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def query(self, endpoint: Endpoint[T], **args: str | int) -> T:
        """Return the reply to a read-only query; `args` are parameters of path and query."""
        return (await self.page(endpoint, **args))[0]

    async def page(self, endpoint: Endpoint[T], **args: str | int) -> tuple[T, str]:
        """Return one page of a listing and the cursor of the next; "" after the last."""
        cursor = ""

        def read(headers: Mapping[str, str]) -> None:
            nonlocal cursor
            cursor = headers.get("next-cursor", "")[:CURSOR_CHARS_MAX]

        reply = await self._call(endpoint, args, patience_s=ASK_S, headers=read)
        return reply, cursor

    async def _call(
        self,
        endpoint: Endpoint[T],
        args: Mapping[str, str | int],
        body: Body | None = None,
        **options: Any,
    ) -> T:
        """Send a request; `options` are fields of `ApiCall`."""
        path, query = endpoint.address(args)
        call = ApiCall(
            method=endpoint.method,
            path=self.client.address.url + path if endpoint.root else path,
            reply=endpoint.reply,
            body=body,
            query=query,
            bytes_max=endpoint.bytes_max,
            **options,
        )
        return await self.client.call(call)

    async def server(self, patience_s: float = FOREVER) -> ServerInfo:
        return await self._call(endpoints.SERVER, {}, secret=False, patience_s=patience_s)

    async def wheel(self, wheel: SignedWheel) -> bytes:
        """Return the bytes of a wheel. Raises InvalidFrame if it is larger than announced."""
        path, _ = endpoints.WHEEL.address({"name": wheel.name})
        data = bytearray()
        async with self.client.stream(self.client.address.url + path, {}, 0) as reply:
            async for piece in reply.body:
                data += piece
                if len(data) > wheel.size:
                    raise InvalidFrame(Sentence("the package is larger than announced"))
        return bytes(data)

    async def register(
        self, request: RegisterRequest, patience_s: float = FOREVER
    ) -> RegisterReply:
        return await self._call(endpoints.REGISTER, {}, request, patience_s=patience_s)

    async def challenge(
        self, volunteer_id: str, nickname: str, patience_s: float = FOREVER
    ) -> Challenge:
        """Return the proof of work that an account's registration requires.

        Raises InvalidName for a nickname that is refused.
        """
        args = {"volunteer": volunteer_id, "nickname": nickname}
        return await self._call(endpoints.CHALLENGE, args, secret=False, patience_s=patience_s)

    async def benchmark(self, request: BenchmarkRequest, patience_s: float = FOREVER) -> None:
        await self._call(endpoints.BENCHMARK, {}, request, patience_s=patience_s)

    async def heartbeat(self, request: Callable[[], HeartbeatRequest]) -> HeartbeatReply:
        """Send a heartbeat; every try calls `request` again, so that its progress is current."""
        return await self._call(endpoints.HEARTBEAT, {}, request)

    async def leave(self, request: LeaveRequest) -> None:
        await self._call(endpoints.LEAVE, {}, request, patience_s=ASK_S)

    async def order_machine(self, request: MachineOrder) -> None:
        """Order another machine of this account to pause, resume or finish. Raises NotFound."""
        await self._call(endpoints.ORDER_MACHINE, {}, request, patience_s=ASK_S)

    async def visibility(self, public: bool) -> None:
        """Show the account's nickname to others, or hide it."""
        request = VisibilityRequest(public=public)
        await self._call(endpoints.VISIBILITY, {}, request, patience_s=ASK_S)

    async def link(self) -> LinkCode:
        return await self._call(endpoints.LINK, {}, patience_s=ASK_S)

    async def consent(self, run: str) -> None:
        await self._call(endpoints.CONSENT, {"run": run})

    # Tasks.

    async def claim(self, request: ClaimRequest) -> ClaimReply:
        """Claim a task. Raises Unavailable for a reply with neither a lease nor a reason."""
        reply = await self._call(endpoints.CLAIM, {}, request, timeout_s=request.wait_s + HELD_S)
        if reply.lease is None and reply.idle is None:
            raise Unavailable(Sentence("the coordinator sent an empty reply to a claim"))
        return reply

    async def begin(
        self,
        task: int,
        attempt: int,
        known: int | None = None,
        *,
        base: int | None = None,
        patience_s: float = FOREVER,
    ) -> BeginReply:
        """Begin a task; the request waits for a running merge that this worker needs.

        `known` is the newest version here, which running work can continue from. `base` is the
        version that work began from while the coordinator did not answer (see
        `volunteer.agent.base_versions`).
        """
        request = BeginRequest(attempt=attempt, newest=known is not None, known=known, base=base)
        timeout_s = LONG_POLL_S_MAX + HELD_S
        return await self._call(
            endpoints.BEGIN, {"task": task}, request, timeout_s=timeout_s, patience_s=patience_s
        )

    async def offer_answers(self, runs: tuple[str, ...]) -> AnswerWork:
        """Offer to answer a prompt of these runs (none: any); the request waits for a prompt."""
        timeout_s = LONG_POLL_S_MAX + HELD_S
        body = AnswerOffer(runs=runs, wait_s=LONG_POLL_S_MAX)
        return await self._call(endpoints.ANSWER_OFFER, {}, body, timeout_s=timeout_s)

    async def answer_tokens(self, answer: str, sent: AnswerTokens) -> bool:
        """Send the next tokens of an answer; return False when no more are wanted."""
        reply = await self._call(
            endpoints.ANSWER_TOKENS, {"answer": answer}, sent, patience_s=SHORT_S
        )
        return reply.go_on

    async def release(
        self, task: int, request: ReleaseRequest, patience_s: float = SHORT_S
    ) -> None:
        await self._call(endpoints.RELEASE, {"task": task}, request, patience_s=patience_s)

    async def forfeit(self) -> Forfeited:
        """Forfeit this account's stake if the coordinator awaits evidence that a machine has lost;
        otherwise do nothing.
        """
        return await self._call(endpoints.FORFEIT, {}, None)

    async def upload(self, request: UploadRequest) -> UploadInfo:
        """Open an upload, or find an earlier one; not retried here, because `Transfers` retries."""
        return await self._call(endpoints.UPLOAD, {}, request, patience_s=0)

    async def blob_url(self, sha256: str) -> str:
        """Return another URL of a blob; "" if there is none or the request fails."""
        try:
            return (await self._call(endpoints.BLOB_URL, {"sha256": sha256}, patience_s=0)).url
        except VolunteerError:
            return ""

    async def submit(self, task: int, request: SubmitRequest) -> SubmitReply:
        """Submit a result; not retried here, because the outbox schedules the next try."""
        return await self._call(endpoints.SUBMIT, {"task": task}, request, patience_s=0)

    # Queries of the agent's loops; a front end calls `query`.

    async def me(self) -> Me:
        return await self.query(endpoints.ME)

    async def runs(self) -> tuple[RunInfo, ...]:
        return await self.query(endpoints.RUNS)

    async def run(self, name: str) -> RunInfo:
        return await self.query(endpoints.RUN, run=name)

    async def versions(self, run: str, cursor: str = "") -> tuple[VersionInfo, ...]:
        return await self.query(endpoints.VERSIONS, run=run, cursor=cursor)

    async def latest(self, run: str) -> SignedManifest:
        return await self.query(endpoints.LATEST, run=run)

    async def version(self, run: str, version: int) -> SignedManifest:
        return await self.query(endpoints.VERSION, run=run, version=version)

    # Record (banned accounts may read it), keys, prompts and gifts.

    async def receipts(self, after: int) -> tuple[SignedReceipt, ...]:
        """Return this account's receipts after a ledger entry, oldest first."""
        return await self.query(endpoints.RECEIPTS, cursor=after)

    async def keys(self) -> tuple[KeyInfo, ...]:
        return await self.query(endpoints.KEYS)

    async def create_key(self, request: KeyRequest) -> NewKey:
        """Make a key; not retried, because a retry could make a second one."""
        return await self._call(endpoints.KEY_CREATE, {}, request, patience_s=0)

    async def revoke_key(self, key: int) -> KeyInfo:
        return await self._call(endpoints.KEY_REVOKE, {"key": key}, patience_s=ASK_S)

    async def model(self, name: str) -> ModelCard:
        """Return a version that answers prompts. Raises NotFound with the nearest name."""
        return await self._call(MODEL, {"model": name}, patience_s=ASK_S)

    async def images(self, request: ImageRequest) -> ImageReply:
        """Draw with an image run; not retried, because a retry could be paid twice."""
        return await self._call(IMAGES, {}, request, patience_s=0, timeout_s=DRAW_S)

    async def usage(self, key: int = 0) -> tuple[UsageRow, ...]:
        return await self.query(endpoints.USAGE, key=key)

    async def give(self, request: GiveRequest) -> Given:
        return await self._call(endpoints.GIVE, {}, request, patience_s=ASK_S)

    async def tree_head(self) -> SignedHead:
        return await self._call(endpoints.TREE_HEAD, {}, secret=False, patience_s=ASK_S)

    async def consistency(self, old: int, new: int) -> TreeProof:
        """Return the proof that the record of `new` entries begins with that of `old`."""
        args = {"old": old, "new": new}
        return await self._call(endpoints.CONSISTENCY, args, secret=False, patience_s=ASK_S)

    async def dataset(self, name: str) -> DatasetManifest:
        return await self._call(endpoints.DATASET, {"dataset": name}, patience_s=FOREVER)

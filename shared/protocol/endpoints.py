"""Every endpoint of the coordinator, defined once: method, path, request, reply, permitted callers.

The coordinator's routes, the client's calls and the queries over the control socket refer to these
definitions; the OpenAPI document and docs/http-api.md are generated from them. Requests are matched
in this order, so the busiest endpoints come first.
"""

from __future__ import annotations

from typing import Any

from shared.protocol import (
    accounts,
    contributions,
    heartbeat,
    inference,
    leases,
    listings,
    members,
    transparency,
    versions,
)
from shared.protocol.base import Health, StoredFile
from shared.protocol.endpoint import (
    BYTES,
    LISTING_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    NOTHING,
    Endpoint,
    Parameter,
)
from shared.workloads.base import DatasetManifest

_CURSOR = (Parameter(name="cursor", kind=int, help="Cursor of the page before."),)
_TAGGED = ("If-None-Match",)

# Registration, reports and orders of machines.

HEARTBEAT = Endpoint(
    method="POST",
    path="/workers/heartbeat",
    summary="Renew leases and report progress; the reply has orders, runs and new verdicts",
    request=heartbeat.HeartbeatRequest,
    reply=heartbeat.HeartbeatReply,
)
REGISTER = Endpoint(
    method="POST",
    path="/workers/register",
    summary="Register a worker; the same ids and secret get the same account",
    auth="none",
    request=accounts.RegisterRequest,
    reply=accounts.RegisterReply,
    strict=True,
    writes=True,
)
CHALLENGE = Endpoint(
    path="/workers/challenge",
    summary="Proof of work for a registration without a code, where the coordinator is open",
    auth="none",
    reply=accounts.Challenge,
    query=(
        Parameter(name="volunteer", kind=str, help="Id of the account to register."),
        Parameter(name="nickname", kind=str, help="Its nickname, checked before any work."),
    ),
    strict=True,
)
BENCHMARK = Endpoint(
    method="POST",
    path="/workers/benchmark",
    summary="Store what a worker measured of itself",
    request=accounts.BenchmarkRequest,
    reply=NOTHING,
)
ME = Endpoint(
    path="/workers/me",
    summary="My account, credits, rank and machines",
    reply=accounts.Me,
)
LEAVE = Endpoint(
    method="POST",
    path="/workers/leave",
    summary="Remove this machine; with `forget` the whole account is wiped",
    request=accounts.LeaveRequest,
    reply=NOTHING,
)
VISIBILITY = Endpoint(
    method="POST",
    path="/workers/visibility",
    summary="Show my nickname to others, or hide it",
    request=accounts.VisibilityRequest,
    reply=NOTHING,
)
ORDER_MACHINE = Endpoint(
    method="POST",
    path="/workers/order",
    summary="Let a machine of my account pause, resume or finish with its next heartbeat",
    request=accounts.MachineOrder,
    reply=NOTHING,
)
LINK = Endpoint(
    method="POST",
    path="/links",
    summary="A ten-minute code that adds a machine to my account",
    reply=accounts.LinkCode,
)

# Claims, uploads and submissions.

CLAIM = Endpoint(
    method="POST",
    path="/claims",
    summary="Take a task; waits up to `wait_s` for one, then says why there is none",
    request=leases.ClaimRequest,
    reply=leases.ClaimReply,
)
BEGIN = Endpoint(
    method="POST",
    path="/tasks/{task}/begin",
    summary="Begin a task: its base version is bound now",
    request=leases.BeginRequest,
    reply=leases.BeginReply,
)
RELEASE = Endpoint(
    method="POST",
    path="/tasks/{task}/release",
    summary="Give a task back",
    request=leases.ReleaseRequest,
    reply=NOTHING,
)
SUBMIT = Endpoint(
    method="POST",
    path="/tasks/{task}/submit",
    summary="Submit a result; the same one again gets the same verdict",
    request=contributions.SubmitRequest,
    reply=contributions.SubmitReply,
)
UPLOAD = Endpoint(
    method="POST",
    path="/uploads",
    summary="Begin an upload for a lease; the same again finds it, or 410 once submitted",
    request=contributions.UploadRequest,
    reply=contributions.UploadInfo,
    writes=True,
)
UPLOAD_BYTES = Endpoint(
    method="PUT",
    path="/uploads/{upload}",
    summary="Send bytes from `Upload-Offset` on; with the last byte the hash is checked",
    reply=contributions.UploadInfo,
    sends=BYTES,
    headers=("Upload-Offset",),
    writes=True,
)
BLOB = Endpoint(
    path="/blobs/{sha256}",
    summary="The bytes of a blob, whole or in ranges",
    reply=NOTHING,
    gives=BYTES,
    headers=("Range", "If-Range", "If-None-Match"),
)
BLOB_URL = Endpoint(
    path="/blobs/{sha256}/url",
    summary="Where else the blob can be fetched: a signed address of the object store",
    reply=versions.BlobUrl,
)

# Queries about runs, datasets and contributions, and the consent to a run.

RUNS = Endpoint(
    path="/runs",
    summary="Every run",
    reply=tuple[accounts.RunInfo, ...],
    bytes_max=LISTING_BYTES_MAX,
)
RUN = Endpoint(path="/runs/{run}", summary="One run", reply=accounts.RunInfo)
CONSENT = Endpoint(
    method="POST",
    path="/runs/{run}/consent",
    summary="I have seen the licence of this run and agree",
    reply=NOTHING,
)
DECLARE_DATA = Endpoint(
    method="PUT",
    path="/runs/{run}/data",
    summary="Declare the numbers of the data that this machine keeps for a run of members",
    request=members.MemberData,
    reply=NOTHING,
    writes=True,
)
WITHDRAW_DATA = Endpoint(
    method="DELETE",
    path="/runs/{run}/data",
    summary="This machine keeps no data for the run any more",
    reply=NOTHING,
)
VERSIONS = Endpoint(
    path="/runs/{run}/versions",
    summary="The history of a run, oldest first; `cursor` is the last version seen",
    reply=tuple[versions.VersionInfo, ...],
    query=_CURSOR,
    bytes_max=LISTING_BYTES_MAX,
)
LATEST = Endpoint(
    path="/runs/{run}/versions/latest",
    summary="The signed manifest of the newest version; its ETag names the weights",
    reply=versions.SignedManifest,
    headers=_TAGGED,
)
VERSION = Endpoint(
    path="/runs/{run}/versions/{version}",
    summary="The signed manifest of one version",
    reply=versions.SignedManifest,
    headers=_TAGGED,
)
LOSS = Endpoint(
    path="/runs/{run}/loss",
    summary="Measured losses, oldest first; of more than 2,000 about so many, evenly spread",
    reply=tuple[listings.LossPoint, ...],
    bytes_max=LISTING_BYTES_MAX,
)
WORKERS = Endpoint(
    path="/runs/{run}/workers",
    summary="Machines at work on a run, without names",
    reply=tuple[accounts.WorkerInfo, ...],
    bytes_max=LISTING_BYTES_MAX,
)
DATASET = Endpoint(
    path="/datasets/{dataset}",
    summary="The manifest of a dataset, without its held-out split",
    reply=DatasetManifest,
    bytes_max=MANIFEST_BYTES_MAX,
)
LEADERBOARD = Endpoint(
    path="/leaderboard",
    summary="Volunteers by credits earned",
    reply=tuple[listings.LeaderRow, ...],
    query=(
        Parameter(name="run", kind=str, help="Only credits from this run."),
        Parameter(name="days", kind=int, help="Only the last so many days."),
    ),
    bytes_max=LISTING_BYTES_MAX,
)
CONTRIBUTIONS = Endpoint(
    path="/contributions",
    summary="My verdicts, newest first; the header `Next-Cursor` continues",
    reply=tuple[contributions.Verdict, ...],
    query=_CURSOR,
    bytes_max=LISTING_BYTES_MAX,
)
LEDGER = Endpoint(
    path="/me/ledger",
    summary="My credits line by line, newest first; `cursor` is the id of the last line seen",
    reply=tuple[listings.LedgerRow, ...],
    query=_CURSOR,
    bytes_max=LISTING_BYTES_MAX,
)

RECEIPTS = Endpoint(
    path="/me/receipts",
    summary="Signed receipts of my payments, oldest first; `cursor` is the last entry I have",
    reply=tuple[transparency.SignedReceipt, ...],
    query=_CURSOR,
)

# Spending and giving credits.

KEYS = Endpoint(
    path="/me/keys",
    summary="My keys of the OpenAI-compatible interface, without their secrets",
    reply=tuple[inference.KeyInfo, ...],
)
KEY_CREATE = Endpoint(
    method="POST",
    path="/me/keys",
    summary="A new key, shown this once",
    request=inference.KeyRequest,
    reply=inference.NewKey,
    writes=True,
)
KEY_REVOKE = Endpoint(
    method="POST",
    path="/me/keys/{key}/revoke",
    summary="Revoke a key",
    reply=inference.KeyInfo,
)
USAGE = Endpoint(
    path="/me/usage",
    summary="My newest 500 requests, newest first, or those of one key",
    reply=tuple[inference.UsageRow, ...],
    query=(Parameter(name="key", kind=int, help="Only requests with this key."),),
    bytes_max=LISTING_BYTES_MAX,
)
GIVE = Endpoint(
    method="POST",
    path="/me/give",
    summary="Give earned credits to another volunteer; the same id again gives nothing more",
    request=inference.GiveRequest,
    reply=inference.Given,
    writes=True,
)

# The record, open to everybody: banned volunteers may check it too.

TREE_HEAD = Endpoint(
    path="/record/head",
    summary="The signed head of the record: its size and the root of its Merkle tree",
    auth="none",
    reply=transparency.SignedHead,
)
CONSISTENCY = Endpoint(
    path="/record/consistency",
    summary="Proof that the record of a size begins with that of a smaller one",
    auth="none",
    reply=transparency.TreeProof,
    query=(
        Parameter(name="old", kind=int, help="The smaller number of entries."),
        Parameter(name="new", kind=int, help="The larger number of entries."),
    ),
)

# Browsers and monitoring.

SERVER = Endpoint(
    path="/server",
    summary="Name, protocol, public key and runs of this coordinator",
    auth="none",
    reply=accounts.ServerInfo,
    query=(
        Parameter(name="nonce", kind=str, help="Nonce to sign in `proof`, up to 64 characters."),
        Parameter(name="at", kind=str, help="Address or pin that the proof names, if it is ours."),
    ),
)
WHEEL = Endpoint(
    path="/install/{name}",
    root=True,
    summary="The wheel of the program that this coordinator runs with",
    auth="none",
    reply=NOTHING,
    gives=BYTES,
)
OPENAPI = Endpoint(
    path="/openapi.json",
    summary="This interface, machine-readable",
    auth="none",
    reply=dict[str, object],
)
HEALTH = Endpoint(
    path="/health",
    root=True,
    summary="The process answers; says if the disk is full",
    auth="none",
    reply=Health,
)
READY = Endpoint(
    path="/ready",
    root=True,
    summary="The database answers and work is taken in; 503 while starting or stopping",
    auth="none",
    reply=Health,
)
METRICS = Endpoint(
    path="/metrics",
    root=True,
    summary="Metrics for Prometheus; beyond loopback with the token of metrics.token",
    auth="none",
    reply=NOTHING,
    gives="text/plain",
)

# Machines of volunteers that answer prompts.

ANSWER_OFFER = Endpoint(
    method="POST",
    path="/answers/offer",
    summary="Offer to answer a prompt; waits up to `wait_s` for one",
    request=inference.AnswerOffer,
    reply=inference.AnswerWork,
)
ANSWER_TOKENS = Endpoint(
    method="POST",
    path="/answers/{answer}/tokens",
    summary="Send the next tokens of an answer; the reply says if more are wanted",
    request=inference.AnswerTokens,
    reply=inference.AnswerGoOn,
)

# Commands and files of the organiser.

ADMIN_COMMAND = Endpoint(
    method="POST",
    path="/admin/{command}",
    summary="Run a command of the organiser; see the commands of the command line",
    auth="admin",
    reply=dict[str, object],
)
ADMIN_PUT = Endpoint(
    method="PUT",
    path="/admin/files/{box}/{name}",
    summary="Put a file into a box, for a command to read",
    auth="admin",
    reply=StoredFile,
    sends=BYTES,
    writes=True,
)
ADMIN_GET = Endpoint(
    path="/admin/files/{box}/{name}",
    summary="Fetch a file that a command has left in a box",
    auth="admin",
    reply=NOTHING,
    gives=BYTES,
)
ADMIN_BLOB = Endpoint(
    path="/admin/blobs/{sha256}",
    summary="The bytes of any blob, whole or in ranges, for the organiser's checkers",
    auth="admin",
    reply=NOTHING,
    gives=BYTES,
    headers=("Range", "If-Range", "If-None-Match"),
)

ENDPOINTS: tuple[Endpoint[Any], ...] = tuple(
    value for value in globals().copy().values() if isinstance(value, Endpoint)
)

# Read-only queries that a volunteer forwards for its front end, by path.
QUERIES: dict[str, Endpoint[Any]] = {
    endpoint.path: endpoint
    for endpoint in ENDPOINTS
    if endpoint.method == "GET" and endpoint.auth == "worker" and not endpoint.gives
}

# OpenAI-compatible interface (docs/inference.md): `coordinator.v1` answers it, and its errors have
# OpenAI's form.
IMAGES_BYTES_MAX = 64 << 20  # fits a reply with IMAGES_MAX pictures
MODEL = Endpoint(
    path="/v1/models/{model}",
    root=True,
    summary="One of them: RUN, RUN@best or RUN@40",
    auth="key",
    reply=inference.ModelCard,
)
IMAGES = Endpoint(
    method="POST",
    path="/v1/images/generations",
    root=True,
    summary="Pictures of an image run, as base64 PNG",
    auth="key",
    request=inference.ImageRequest,
    reply=inference.ImageReply,
    bytes_max=IMAGES_BYTES_MAX,
)
V1: tuple[Endpoint[Any], ...] = (
    Endpoint(
        path="/v1/models",
        root=True,
        summary="Versions that I may ask, with licence, dataset, loss and price",
        auth="key",
        reply=inference.ModelList,
    ),
    MODEL,
    Endpoint(
        method="POST",
        path="/v1/completions",
        root=True,
        summary="Continue a text; with `stream` as server-sent events",
        auth="key",
        request=inference.CompletionRequest,
        reply=dict[str, object],
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        root=True,
        summary="Continue a conversation; with `stream` as server-sent events",
        auth="key",
        request=inference.ChatRequest,
        reply=dict[str, object],
    ),
    IMAGES,
)

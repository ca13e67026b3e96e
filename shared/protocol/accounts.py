"""Facts about runs, the server, machines and accounts; registration of an account."""

from __future__ import annotations

from typing import Literal

from shared.protocol.base import Count, Message, RunState, Standstill
from shared.protocol.members import MembersData
from shared.protocol.protocol_version import PROTOCOL
from shared.protocol.transparency import SignedRestore
from shared.protocol.versions import SuiteCourse
from shared.workloads.declaration import Measure, Output, Teaching


class PrivacySpent(Message):
    """Differential privacy of a run over members' data, as spent for any one account."""

    epsilon: float | None  # spent by the versions so far; None where no library computes it
    planned: float | None  # epsilon after the last merge
    budget: float
    delta: float
    merges: int  # merges so far
    merges_max: int
    noise: float  # standard deviation, as a multiple of one member's largest influence
    clip: float  # largest norm with which a member counts in a merge

    @property
    def text(self) -> str:
        """Return the spent privacy in words."""
        if self.epsilon is None or self.planned is None:
            return f"budget {self.budget:g}; this server has no dp-accounting to say what is spent"
        return (
            f"epsilon {self.epsilon:.3g} after {self.merges} of {self.merges_max} merges,"
            f" {self.planned:.3g} after the last (delta {self.delta:g}), for each account"
        )

    @property
    def explained(self) -> str:
        """Return the spent privacy in words, and what it means for a person with several
        accounts.
        """
        return (
            f"{self.text}. Somebody with k accounts is protected k times less and weighs k times"
            " more: vouch for everybody once"
        )


class RunInfo(Message):
    """Facts about a run that help a volunteer choose."""

    name: str
    state: RunState
    workload: str
    workload_version: int
    description: str
    licence: str  # licence of the resulting model
    contact: str
    dataset: str
    dataset_licence: str
    parameters: int
    version: int  # newest version
    loss: float | None  # newest measured loss
    loss_first: float | None
    workers: int  # live workers
    progress: float | None  # share of [stop], 0..1; None if unknown
    credits_per_step: float
    step_flops: float  # operations of one training step with the run's batch_size
    memory_bytes: int  # memory that a device roughly needs
    steps: int = 0  # global steps
    tokens: int = 0  # samples x size merged so far
    merging: str = ""  # such as "merging after 2 more contributions or 3:12"; "" in a standstill
    standstill: Standstill | None = None
    ends_at: float | None = None  # estimated end, by the pace since the start; None if unknown
    items: str = "tokens"  # unit of `tokens`
    output: Output = "text"
    taught_by: Teaching = "samples"
    measure: Measure = "loss"  # what the field `loss` measures
    origin: str = ""  # base model that the run continues; "" = random weights
    origin_licence: str = ""
    origin_bytes: int = 0  # bytes of the base model's files, which each volunteer downloads once
    # Loss in bits for each byte of held-out text, which runs with other tokenizers share: of
    # version 0 and of the newest version.
    bits_first: float | None = None
    bits: float | None = None
    suites: tuple[SuiteCourse, ...] = ()  # the run's scores on task suites
    libraries: tuple[str, ...] = ()  # libraries that training needs besides the workload's
    privacy: PrivacySpent | None = None  # None where merges add no noise
    members: MembersData | None = None  # data that its members keep; None = the organiser keeps it
    streamed_bytes: int = 0  # memory of a device while the weights stay on the host; 0 = never


class SignedWheel(Message):
    """Wheel of the coordinator's program, to be downloaded from /install/NAME."""

    name: str
    sha256: str
    size: int
    signature: str  # hex, of the text `signed`

    @property
    def signed(self) -> str:
        """Return the text that the signature is of."""
        return f"volunteer wheel\n{self.name}\n{self.sha256}\n{self.size}\n"


class ServerInfo(Message):
    name: str
    software: str  # version of the package
    protocol: int
    protocol_min: int
    protocol_min_next: int  # next `protocol_min`, announced before it is enforced
    public_key: str  # hex
    fingerprint: str
    invite_only: bool
    contact: str
    now: float
    runs: tuple[RunInfo, ...]
    open: bool = False  # strangers register without a code, on probation
    proof_of_work_bits: int = 0  # difficulty of a registration without a code; 0 = no proof
    # Hex signature over the request's nonce, which proves that the server holds the key.
    proof: str = ""
    wheel: SignedWheel | None = None  # None: `install` replaces it, or it cannot be built
    install: str = ""  # the organiser's own command line for installing, in place of the wheel
    restored: SignedRestore | None = None  # the last restore from a backup
    store: bool = False  # volunteers use the coordinator's object store, by signed URLs
    mirrors: tuple[str, ...] = ()  # addresses below which the blob abcdef... is at ab/abcdef...


class Device(Message):
    """One device of a worker."""

    id: str  # "cpu", "cuda:0", "mps"
    kind: Literal["cpu", "cuda", "rocm", "mps", "xpu"]
    name: str
    memory_bytes: int
    usable: bool = True
    problem: str = ""  # reason why it is unusable, and the command that repairs it


class Hardware(Message):
    hostname: str = ""
    system: str = ""
    cores: int = 0  # physical cores
    threads: int = 0
    memory_bytes: int = 0
    devices: tuple[Device, ...] = ()
    torch: str = ""
    python: str = ""


class Benchmark(Message):
    """Result of a benchmark on the worker's own training thread."""

    device: str
    fp32_flops: float  # matmul
    bf16_flops: float
    step_flops: float  # operations a second of a real training step, which sizes tasks
    at: float = 0.0


class RegisterRequest(Message):
    """Registration; the client stores its ids and secret before the first byte leaves."""

    volunteer_id: str
    worker_id: str
    secret: str
    nickname: str
    public: bool = True  # shown on the leaderboard
    code: str = ""  # invite or link code
    protocol: Count = PROTOCOL
    software: str = ""
    hardware: Hardware = Hardware()
    workloads: tuple[str, ...] = ()
    # Runs whose licence and consent text were shown and accepted.
    accepts: tuple[str, ...] = ()
    # Proof of work, if the coordinator is open and there is no code: a nonce in hex for which
    # SHA-256(challenge || nonce) begins with the challenge's number of zero bits.
    challenge: str = ""
    nonce: str = ""


class Challenge(Message):
    """Proof of work required for a registration, valid for one account."""

    challenge: str
    bits: int  # 0 = no proof is required
    expires_at: float


class RegisterReply(Message):
    volunteer_id: str
    worker_id: str
    nickname: str
    created: bool  # False: the id was registered before
    server: ServerInfo


class WorkerInfo(Message):
    worker_id: str
    hostname: str
    state: Literal["online", "training", "paused", "offline", "left"]
    device: str
    last_seen: float
    rate: float | None = None  # steps a second
    task: int | None = None
    run: str = ""  # run of the task
    celsius: float | None = None  # temperature of the machine's hottest device
    day_micro: int | None = None  # pay of its work of the last 24 hours; None if not counted yet


class Me(Message):
    volunteer_id: str
    nickname: str
    public: bool
    state: Literal["active", "banned"]
    earned_micro: int
    pending_micro: int
    spent_micro: int
    today_micro: int
    rank: int | None
    accepted: int
    rejected: int
    merged: int
    device_s: float
    workers: tuple[WorkerInfo, ...]
    escrow_micro: int = 0  # at stake until later work is recomputed and agrees
    invited: bool = False  # the organiser vouched for the account: unproven work forfeits no pay
    proving: int = 0  # tasks drawn for a recompute that has no result yet
    proved_in_s: float | None = None  # estimated time until all have a result; None if unknown
    # Credits owed, because they were spent before they were taken back or forfeited. Later pay
    # settles the debt first.
    debt_micro: int = 0
    standing: Literal["probation", "vetted", "suspended"] = "vetted"
    held_micro: int = 0  # reserved for unfinished answers: spent or returned at their end
    standing_reason: str = ""  # reason of a suspension, with the contact to write to
    at: float = 0.0  # when the coordinator read these values, by its clock

    @property
    def balance_micro(self) -> int:
        """Return the spendable balance; negative while a debt is open."""
        return self.earned_micro - self.spent_micro - self.held_micro


class LinkCode(Message):
    """Ten-minute code that adds a machine to an account."""

    code: str
    link: str
    expires_at: float


class BenchmarkRequest(Message):
    benchmarks: tuple[Benchmark, ...]
    hardware: Hardware | None = None
    # workloads that the worker may run from now on; None = as registered
    workloads: tuple[str, ...] | None = None


class LeaveRequest(Message):
    forget: bool = False


class MachineOrder(Message):
    """Order of the owner to one machine of the account, given from another."""

    worker_id: str
    order: Literal["pause", "resume", "finish"]


class VisibilityRequest(Message):
    """Request to show the nickname of this account to others from now on, or to hide it."""

    public: bool

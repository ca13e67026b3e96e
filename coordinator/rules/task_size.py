"""Size of a task: samples, bytes and price. No price depends on a worker's report."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from coordinator.plan.merge_readiness import quorum_of
from coordinator.plan.plan_tables import Plan
from coordinator.rules.run_file import RunFile, TaskSettings
from shared.protocol.limits import DEVICE_BYTES, LONG_POLL_S_MAX
from shared.units import MIB

OPTIMISM = 2.0  # factor on a benchmark, which leaves out downloads, evaluation and other programs
# Share of the median speed below which tasks are made smaller; a larger share would exceed the
# precision of benchmarks.
SLOWER = 0.75
SPLIT_FACTOR = 2.0  # a returned range that would take this many times its target is split
UPLOAD_SLACK_BYTES = MIB
CLAMP = 16.0  # a newcomer's speed counts as at most this many times above or below the median
# A schedule may be longer than its run by this factor, and by at most this many steps. The run then
# ends above the lowest rate: merging several workers averages noise like a low rate. A third more
# is already too much in long runs (measured, docs/decisions/0025-async-in-step.md).
LONGER = 1.5
LONGER_STEPS = 600
COOLS_FROM = 0.75  # share of a run after which the outer rate falls
COOLS_TO = 0.1  # share of the outer rate at the end of the run
LONG = 160  # least versions of a run that cools: a run of 87 ended worse with cooling
# A model of this size learns nearly as much with so many local steps as with half of them, and less
# with twice as many (docs/experiments.md).
PARAMETERS_SMALL, STEPS_SMALL = 1_000_000, 60
STEPS_LARGE = 1000  # published runs of 150 million parameters and more lose little with so many
STEPS_MAX = (1 << 31) - 1  # most steps of a run that fit a message
GAME_BYTES_MAX = 1 << 18  # largest size of one compressed game


LEAST_PART = 0.2  # least share to which a task is cut so that it ends with the running round
LIKE = 0.8  # a returned task with at least this share of a new task's steps ends with the others

# least expected time, as a share of the time that a worker's own benchmark predicts
BENCHMARK_LEAST = 0.25


class RoundInWork(msgspec.Struct, frozen=True, kw_only=True):
    """Expected end of a round, in which most workers share a merge."""

    merge_at: float
    # seconds of the round that are left when a device's task ends, by worker and device
    left_s: Mapping[tuple[str, str], float] = {}


class RunPace(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a run's latest tasks, as medians."""

    step_s: float  # seconds a step, transfers included
    flops: float  # operations a second of the workers that did these tasks; 0 = unknown
    train_step_s: float = 0.0  # seconds a step without transfers; 0 = unknown
    transfer_s: float = 0.0  # seconds of a task besides training
    round: RoundInWork | None = None  # None: most workers share no merges, or nobody works


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Running run, as the dispatch of work sees it."""

    id: int
    name: str
    workload: str
    kind: str
    codec: str
    memory_bytes: int
    weight: float
    settings: TaskSettings
    local_steps: int
    passes: int  # passes to make; 0 = no end
    step_flops: float
    price_micro: int  # price of one step
    seed: int
    pass_no: int
    cursor: int
    samples_total: int
    pace: RunPace | None = None
    streamed_bytes: int = 0  # memory of a device while the weights stay on the host; 0 = never
    workload_version: int = 0  # 0 = not checked
    libraries: tuple[str, ...] = ()  # libraries that its workload needs besides its own
    beside: tuple[str, ...] = ()  # kinds of tasks that are not cut from the pass
    endless: bool = False  # the pass grows and never ends
    short_of: str = ""  # what the pass waits for when all its samples are taken
    lately: float = 0.0  # recently given operations, fading (see `FairShares`)
    steps_provable: int = 0  # most steps that a recompute can prove; 0 = no bound
    left_s: float | None = None  # seconds of the round when a task begins; None = no rounds
    # Worker whose own data the pass is over, with no samples if the worker keeps no data; "" = the
    # dataset.
    home: str = ""
    lacks: int = 0  # members whose updates the next version lacks
    waits: bool = False  # True: an update of this worker's account waits for theirs

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind, *self.beside)


def clamped(run: Run, flops: float, step_s: float = 0.0) -> float:
    """Return the speed that sizes the work of an uninvited account; 0 = unknown.

    The speed comes from `step_s`, its device's recent seconds a step in this run, or from its
    benchmark if that is 0. Either is limited to a factor of the run's median, so that a made-up
    speed gives neither a lease of a day nor a huge task.
    """
    if run.pace is None or run.pace.flops <= 0:
        return 0.0
    median = run.pace.flops
    expected_flops = median * run.pace.step_s / step_s if step_s > 0 else flops
    return min(CLAMP * median, max(median / CLAMP, expected_flops)) if expected_flops > 0 else 0.0


def memory_bytes(parameters: int, fixed: int = 0) -> int:
    """Return the memory that a device needs to train a model of this size, plus `fixed` bytes."""
    return parameters * DEVICE_BYTES + fixed


def upload_bytes_max(parameters: int) -> int:
    """Return the maximum size of one update of a model of this size, for any codec."""
    return parameters * 4 + parameters // 16 + UPLOAD_SLACK_BYTES


def episodes_bytes_max(episodes: int) -> int:
    """Return the maximum size of a file of episodes."""
    return episodes * GAME_BYTES_MAX + UPLOAD_SLACK_BYTES


def pass_seed(seed: int, pass_no: int) -> int:
    """Return the seed of a pass's permutation, derived from the run's."""
    return _derived(f"pass {seed} {pass_no}")


def task_seed(seed: int, pass_no: int, start: int) -> int:
    """Return the seed of a task, derived from the run's seed and its position."""
    return _derived(f"task {seed} {pass_no} {start}")


def home_seed(seed: int, home: str) -> int:
    """Return the seed of the passes over a worker's own data; the run's seed without a `home`."""
    return _derived(f"home {seed} {home}") if home else seed


def _derived(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # fits a signed 64-bit column


def estimate_s(run: Run, steps: int, flops: float) -> float | None:
    """Return the expected seconds for a worker of this speed, by others' times or its benchmark;
    None = unknown.

    Others' times count as at least a quarter of the benchmark's estimate, since faked work takes no
    time.
    """
    by_benchmark = steps * run.step_flops / flops if flops > 0 and run.step_flops > 0 else 0.0
    if run.pace is not None:
        has_flops = flops > 0 and run.pace.flops > 0
        by_pace = steps * run.pace.step_s * (run.pace.flops / flops if has_flops else 1.0)
        return max(by_pace, by_benchmark * BENCHMARK_LEAST)
    return OPTIMISM * by_benchmark if by_benchmark > 0 else None


def target_s(run: Run) -> float:
    """Return a task's target time: set in `[task]`, or the median worker's; 0 = unknown."""
    settings = run.settings
    if settings.target_seconds > 0 or not settings.by_speed:
        return settings.target_seconds
    has_pace = run.pace is not None and run.pace.flops > 0
    return run.local_steps * run.pace.step_s if run.pace is not None and has_pace else 0.0


def steps_for(run: Run, flops: float) -> int:
    """Return the number of steps of a new task for a worker of this speed, at most as many as a
    recompute can prove.

    No worker gets more than `local_steps` unless `target_seconds` is set. A worker much slower than
    the median gets fewer steps, which take the median's time, so that no merge waits for it. A task
    that begins in the middle of a round ends with the round.
    """
    steps = _steps_by_speed(run, flops)
    rest = _rest_of_round(run, flops)
    if rest >= LEAST_PART * steps:
        steps = min(steps, rest)
    return min(steps, run.steps_provable) if run.steps_provable else steps


def _rest_of_round(run: Run, flops: float) -> int:
    """Return the steps that end with the running round; 0 if the run has no rounds or the round
    ends too soon.
    """
    if run.pace is None or run.left_s is None or run.left_s <= LONG_POLL_S_MAX:
        return 0
    trains_s = max(0.0, run.left_s - run.pace.transfer_s)
    return int(trains_s / _train_step_s(run.pace, flops))


def _train_step_s(pace: RunPace, flops: float) -> float:
    has_flops = flops > 0 and pace.flops > 0
    return pace.train_step_s * (pace.flops / flops if has_flops else 1.0)


class TaskInWork(NamedTuple):
    """Begun task of a pass."""

    worker_id: str
    device: str
    begun_at: float
    steps: int
    flops: float  # speed of its worker; 0 = unknown


def round_in_work(
    plan: Plan, pace: RunPace, tasks: Sequence[TaskInWork], waiting: int
) -> RoundInWork | None:
    """Return the round that ends when enough of these tasks have ended for a merge, together with
    the `waiting` contributions that are not merged yet. None if the workers of the run do not share
    merges, or too few tasks are at work.
    """
    shared = plan.update == "delta" and plan.quorum_share > 0.5 and not plan.overlap
    missing = quorum_of(plan, len(tasks) + waiting) - waiting
    if not shared or pace.train_step_s <= 0 or missing > len(tasks):
        return None
    ends = {
        (task.worker_id, task.device): task.begun_at
        + pace.transfer_s
        + task.steps * _train_step_s(pace, task.flops)
        for task in tasks
    }
    merge_at = sorted(ends.values())[min(missing, len(ends)) - 1] if missing > 0 else 0.0
    left_s = {device: merge_at - end for device, end in ends.items()}
    return RoundInWork(merge_at=merge_at, left_s=left_s)


def keeps_step(run: Run, steps: int, flops: float) -> bool:
    """Return True if a returned task of so many steps leaves its worker in step with others: it is
    about as long as a new task, or the run has no rounds.
    """
    return run.left_s is None or steps >= LIKE * steps_for(run, flops)


def _steps_by_speed(run: Run, flops: float) -> int:
    settings, task_s = run.settings, target_s(run)
    step_s = estimate_s(run, 1, flops) if task_s > 0 else None
    if not step_s:
        return run.local_steps
    fitting = int(task_s / step_s)
    if settings.target_seconds > 0:
        return max(settings.min_steps, min(settings.max_steps, fitting))
    if flops <= 0 or fitting >= SLOWER * run.local_steps:
        return run.local_steps
    return min(run.local_steps, max(settings.min_steps, fitting))


def samples_for(run: Run, left: int, flops: float) -> int:
    """Return the samples of a new task for a worker of this speed, of `left` without a task.

    If the server sizes tasks, it cuts the remaining samples of a pass into equal tasks, since a
    short last task would end before all others and bring its machine out of step with them.
    """
    batch = run.settings.batch_size
    most = steps_for(run, flops) * batch
    if run.settings.local_steps or run.endless:
        return min(left, most)
    tasks = -(-left // most)
    return min(left, batch * math.ceil(left / tasks / batch))


def steps_of_task(file: RunFile, plan: Plan, parameters: int, pace: RunPace | None) -> int:
    """Return the steps of a task of a run: as its file says, or, where the file leaves the number
    to the server, enough to keep the share of the time besides training below the plan's
    `transfer_share`, but at most `steps_that_learn`.
    """
    share = plan.transfer_share if plan.update == "delta" and not file.task.local_steps else 0.0
    if not share or pace is None or pace.train_step_s <= 0:
        return file.steps
    fitting = pace.transfer_s / pace.train_step_s * (1 - share) / share
    return max(file.steps, min(steps_that_learn(parameters), math.ceil(fitting)))


def steps_that_learn(parameters: int) -> int:
    """Return the most steps of a task that the server sizes: a large model still learns well with
    more local steps than a small one. Measured up to a million parameters; for larger models the
    evidence is published runs (docs/decisions/0036-fresh-optimisers.md).
    """
    times = math.sqrt(max(1.0, parameters / PARAMETERS_SMALL))
    return min(STEPS_LARGE, round(STEPS_SMALL * times))


def steps_of_update(plan: Plan, local_steps: int) -> int:
    """Return the steps behind one full contribution of a task of `local_steps`."""
    parted = plan.update == "gradient" and plan.gradient_every > 0
    return min(local_steps, plan.gradient_every) if parted else local_steps


class StepsAndTokens(NamedTuple):
    """Progress of a run at a version."""

    global_step: int
    tokens: int


def total_steps(
    file: RunFile,
    plan: Plan,
    samples: int,
    sample_size: int = 1,
    progress: StepsAndTokens | None = None,
) -> int:
    """Return the expected global steps of a run, as far as `[stop]` limits them; 0 = unknown.

    `samples` is the size of a pass (0 = no end), `sample_size` the items of a sample. The steps of
    a run that ends by samples or tokens depend on the number of parallel workers. The plan's quorum
    gives one estimate; the progress so far, `progress`, gives another, which bounds the first (only
    from above if versions end the run).
    """
    if file.train.decay_steps:
        return file.train.decay_steps
    ends = [file.stop.passes * samples * sample_size, file.stop.tokens if samples else 0]
    tokens = min((end for end in ends if end), default=0)
    expected = _expected_steps(file, plan, samples, sample_size)
    if progress is None or not (tokens and progress.tokens and progress.global_step):
        return expected
    by_progress = progress.global_step * tokens / progress.tokens
    longest = min(LONGER * by_progress, by_progress + LONGER_STEPS)
    if file.stop.versions:  # `versions` may end the run before the tokens do
        return min(expected, round(longest))
    return min(STEPS_MAX, round(max(by_progress, min(expected, longest))))


def share_done(file: RunFile, samples: int, sample_size: int, version: int, tokens: int) -> float:
    """Return the finished share of a run, as far as `[stop]` defines it; 0 for an endless run."""
    stop = file.stop
    ends = [stop.passes * samples * sample_size, stop.tokens]
    done = [tokens / end for end in ends if end]
    done += [version / stop.versions] if stop.versions else []
    return max(done, default=0.0)


def _expected_steps(file: RunFile, plan: Plan, samples: int, sample_size: int) -> int:
    """Return the global steps of a run whose versions all merge a quorum; 0 = no end."""
    stop = file.stop
    steps = steps_of_update(plan, file.steps)
    version_samples = steps * file.task.batch_size * plan.quorum
    ends = [stop.passes * samples, stop.tokens / sample_size if samples else 0]
    versions = [end / version_samples for end in ends if end]
    versions += [stop.versions] if stop.versions else []
    return math.ceil(min(versions, default=0) * steps - 1e-6)


def cooling(done: float, version: int) -> float:
    """Return the factor on the outer rate of a run with this share done: 1, or less near its end.

    Momentum applies each round several times, so the last versions oscillate around their target
    even at a low rate of the workers (docs/decisions/0027-cooling.md).
    """
    if version < LONG * done or not done:
        return 1.0
    left = (1.0 - min(1.0, done)) / (1.0 - COOLS_FROM)
    return min(1.0, COOLS_TO + (1.0 - COOLS_TO) * left)


def steps_in(samples: int, batch_size: int) -> int:
    return -(-samples // batch_size)


def parts_of(steps: int, part_steps: int) -> int:
    """Return the number of updates of a task, one each `part_steps` steps (0 = one at its end)."""
    return -(-steps // part_steps) if part_steps else 1


def first_part(steps: int, price: int, part_steps: int) -> tuple[int, int]:
    """Return steps and micro-credits of the next part; the last part takes the remainder."""
    if not part_steps or steps <= part_steps:
        return steps, price
    return part_steps, price * part_steps // steps


def work_of(run: Run, price_micro: int) -> float:
    """Return the operations of a task that costs this much, in proportion to a step of its run."""
    return price_micro / max(1, run.price_micro) * run.step_flops


def price_micro(run: Run, samples: int) -> int:
    return max(1, run.price_micro * samples // run.settings.batch_size)


def split_at(run: Run, start: int, stop: int, flops: float) -> int:
    """Return where a returned range is split, so that its first part suits a worker of this speed
    and can be proved; `stop` if it is not split.
    """
    settings = run.settings
    steps = steps_in(stop - start, settings.batch_size)
    fitting = steps_for(run, flops)
    expected = estimate_s(run, steps, flops)
    limit_s = SPLIT_FACTOR * target_s(run)
    slow = limit_s > 0 and expected is not None and expected > limit_s
    most = min(settings.max_steps, run.steps_provable or steps)
    early = fitting < _steps_by_speed(run, flops)
    if not (slow or early or steps > most) or fitting >= steps:
        return stop
    return start + fitting * settings.batch_size

"""Definition of a run: workload, schema and plan of its file, computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from coordinator.aggregation.shards import split
from coordinator.plan import privacy
from coordinator.plan.plan import plan as read_plan
from coordinator.plan.plan_checks import BATCH_MAX, check_steps
from coordinator.plan.plan_tables import Plan
from coordinator.plan.presets import PRESETS, TASKS
from coordinator.rules import run_file
from coordinator.rules.run_file import RunFile
from coordinator.rules.task_size import StepsAndTokens, share_done, total_steps
from shared.errors import InvalidRunFile
from shared.programs.machine_limits import free_memory_bytes
from shared.proofs.signing import canonical, digest
from shared.tensors.spec import Schema, parameters
from shared.workloads.base import RunDraft, RunTable, TrainSettings, Workload, load
from shared.workloads.declaration import Declaration

if TYPE_CHECKING:
    from coordinator.database.runs import RunRow
    from shared.workloads.base import ChunkRef
    from shared.workloads.experience import Pacing

# Three times the size in float32: the file's content, the model built from it, and the evaluation.
BYTES_A_PARAMETER = 12
TOKENIZER = "tokenizer"  # name of the asset, and of the file
GB = 1e9

# operations of one credit by default, so that equal device time earns alike on every workload
CREDIT_FLOPS = 1e10
MICRO = 1_000_000
CHAIN_BYTES_MIN = 1 << 18  # a smaller model is sent whole by default, not as a chain

# Defaults of a run that strangers may join: with two of five volunteers hostile the model moves
# little, and honest work costs less than 1 % of the loss (measured, docs/experiments.md).
OPEN_RULE: Mapping[str, object] = {"aggregate": "centred-clip", "aggregate_from": 5}
# A smaller quorum with two fifths hostile has hostile majorities too often.
OPEN_QUORUM: Mapping[str, object] = {"quorum": 5, "quorum_share": 0.75}
# Updates with a norm above 1.5 times the cohort's median are scaled down; refusal begins at the
# same norm as by default.
OPEN_TABLES: Mapping[str, Mapping[str, object]] = {
    "validation": {"norm_room": 0.5, "clip_until": 2.0},
    "evaluation": {"gate": True},
}


# Keys of `[train]` that only a worker's optimiser reads.
WORKERS_OWN = frozenset({"optimizer", "prox_mu"})


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """A run's file, and the facts that follow from the file alone."""

    file: RunFile
    plan: Plan
    workload: Workload
    schema: Schema
    schema_sha256: str
    parameters: int

    def total_steps(self, run: RunRow, progress: StepsAndTokens | None = None) -> int:
        """Return the expected total of global steps, from the head or `progress`; 0 = unknown."""
        progress = progress or StepsAndTokens(run.global_step, run.tokens)
        samples = self._samples(run)
        return total_steps(self.file, self.plan, samples, run.sample_size, progress)

    def share_done(self, run: RunRow, version: int, tokens: int) -> float:
        """Return the finished share of a run at a version; 0 without a known end."""
        return share_done(self.file, self._samples(run), run.sample_size, version, tokens)

    def _samples(self, run: RunRow) -> int:
        """Return the number of samples of a pass; 0 for a run that makes its own samples, whose
        pass never ends.
        """
        return run.samples_total if self.declaration.taught_by == "samples" else 0

    @property
    def declaration(self) -> Declaration:
        return self.workload.declaration

    @property
    def at_members(self) -> bool:
        """Return True if the members of the run keep its data: nobody else has the data to repeat
        their tasks, so no task is drawn, audited or recomputed.
        """
        return self.file.data.at == "members"

    @property
    def members_min(self) -> int:
        """Return the fewest accounts whose updates make a version."""
        return self.plan.min_contributions if self.at_members else 1

    @property
    def members_choose(self) -> bool:
        """Return True if the losses that members measure choose the best version. These losses get
        no noise, so a run with `[privacy]` is measured only on the organiser's example.
        """
        return self.at_members and not self.file.privacy.on

    def tokenizer(self, assets: Mapping[str, ChunkRef]) -> ChunkRef | None:
        """Return the tokenizer: of the dataset, by its assets, else among the run's own files."""
        files = self.workload.files(self.file.model)
        return assets.get(TOKENIZER) or files.get(TOKENIZER)

    @property
    def pacing(self) -> Pacing | None:
        """Return the pacing of a run's experience; None for a run that makes no experience."""
        experience = self.workload.experience
        return experience.plan(self.file.model, self.file.task.options) if experience else None

    @property
    def matches_choose(self) -> bool:
        """Return True if matches, not evaluations, choose the best version of the run."""
        pacing = self.pacing
        return self.declaration.measure == "matches" and bool(pacing and pacing.match_every)


@lru_cache(maxsize=64)
def of_file(text: str) -> Definition:
    """Return the definition of a stored run file.

    Raises NotFound if its workload is not installed here, InvalidPlan for a plan that cannot work
    with its model.
    """
    file = run_file.decode(text)
    workload = load(file.workload)
    schema, plan = workload.schema(file.model), read_plan(file.plan)
    split(schema, plan.shards, plan.shard_by)  # raises if this number of shards is impossible
    sized = file.task.max_steps if file.task.target_seconds > 0 else 0
    check_steps(plan, file.steps, sized)
    privacy.check(file.privacy, plan, schema, data=file.data, gate=file.evaluation.gate)
    _check_momenta(file.train, plan, schema)
    return Definition(
        file=file,
        plan=plan,
        workload=workload,
        schema=schema,
        schema_sha256=digest(canonical(schema)),
        parameters=parameters(schema),
    )


def _check_momenta(train: TrainSettings, plan: Plan, schema: Schema) -> None:
    """Raise InvalidRunFile for momenta that no optimiser of this run would move or bound."""
    has_momenta = any(spec.role == "momentum" for spec in schema)
    is_bounded = (
        plan.update == "delta"
        and plan.codec != "float32"
        and train.optimizer == "muon"
        and train.clip_norm > 0
    )
    if has_momenta and not is_bounded:
        raise InvalidRunFile(
            "[model] shared_momentum = true shares the momentum of local steps by Muon: it needs a"
            ' [plan] of deltas with a codec other than "float32", [train] optimizer = "muon" and'
            " clip_norm above 0"
        )


def check_train(settings: TrainSettings, plan: Plan, *, learns: bool = False) -> None:
    """Raise InvalidRunFile for keys of `[train]` that nothing reads in a plan of gradients, whose
    steps the server makes, and for such a plan if the workload `learns` from data of its own.
    """
    if learns and plan.update != "delta":
        raise InvalidRunFile(
            f'[plan] the preset "{plan.preset}" merges gradients, but learners of this workload'
            ' send deltas: take the preset "self-play"'
        )
    if plan.update == "delta":
        return
    by_train = plan.optimizer == "adamw"
    always_read = {"precision", "init_from"}
    keys = WORKERS_OWN if by_train else {*TrainSettings.__struct_fields__} - always_read
    plain = TrainSettings()
    idle = [
        key
        for key in TrainSettings.__struct_fields__
        if key in keys and getattr(settings, key) != getattr(plain, key)
    ]
    if idle:
        how = "AdamW" if by_train else f'the optimizer "{plan.optimizer}" and lr of [plan]'
        raise InvalidRunFile(
            f'[train] {" and ".join(idle)}: in the preset "{plan.preset}" workers send gradients'
            f" and the server makes the steps, by {how}; take these lines out, or take a preset of"
            " deltas, e.g. fedavg"
        )


def check_mixing(about: Definition) -> None:
    """Raise InvalidRunFile for a number of members that no merge takes, or a rule that may leave
    members out of a version that is promised to mix several.
    """
    least, rule = about.members_min, about.plan.aggregate
    if least > BATCH_MAX:
        raise InvalidRunFile(
            f"[plan] min_contributions = {least} is more than one merge takes: set it to "
            f"{BATCH_MAX} or less"
        )
    if least > 1 and rule not in ("mean", "norm-clip"):
        raise InvalidRunFile(
            f"[plan] min_contributions = {least} promises members that each version mixes so many"
            f' of them, and aggregate = "{rule}" may leave all but one out: take "mean" or'
            ' "norm-clip", or min_contributions = 1'
        )


def table_defaults(
    written: Mapping[str, RunTable],
    workload: Workload,
    model_parameters: int,
    *,
    strangers: bool = False,
) -> dict[str, RunTable]:
    """Return the defaults of a run file, by table: of its workload, or else of its preset, or
    else, for a run that `strangers` may join, of open runs.
    """
    plan = written.get("plan", {})
    preset = str(plan.get("preset"))
    whole_plan = {**PRESETS.get(preset, {}), **plan}
    draft = RunDraft(tables=written, plan=whole_plan, parameters=model_parameters)
    tables = dict(workload.defaults(draft))
    tables |= {"task": {**TASKS.get(preset, {}), **tables.get("task", {})}}
    return _for_strangers(plan, tables) if strangers else tables


def _for_strangers(written_plan: RunTable, tables: Mapping[str, RunTable]) -> dict[str, RunTable]:
    """Return the defaults of an open run; a file that sets aggregation or quorum keeps them."""
    plan_keys = {**tables.get("plan", {}), **written_plan}
    preset = PRESETS.get(str(plan_keys.get("preset", "fedavg")), {})
    plan = OPEN_RULE if "aggregate" not in plan_keys else {}
    if not OPEN_QUORUM.keys() & plan_keys.keys() and "quorum" not in preset:
        plan = {**plan, **OPEN_QUORUM}
    merged = {**tables, "plan": {**plan, **tables.get("plan", {})}}
    for name, values in OPEN_TABLES.items():
        merged[name] = {**values, **tables.get(name, {})}
    return merged


def with_downlink(plan: Mapping[str, object], model_bytes: int) -> dict[str, object]:
    """Return a `[plan]` table with its downlink; "auto", or a missing key, becomes the downlink
    that suits the model's size.

    A run's creation decides this and stores it with the run.
    """
    if plan.get("downlink", "auto") != "auto":
        return dict(plan)
    return {**plan, "downlink": "chain" if model_bytes >= CHAIN_BYTES_MIN else "float32"}


def definition(run: RunRow) -> Definition:
    """Return the definition of a run."""
    return of_file(run.file)


def step_price_micro(file: RunFile, step_flops: float) -> int:
    """Return the micro-credits of one training step with the run's batch_size, at least one."""
    price = file.credit.credits_per_step or step_flops / CREDIT_FLOPS
    return max(1, round(price * MICRO))


def price_of_flops(price_micro: int, step_flops: float, flops: float) -> int:
    """Return the micro-credits of work other than steps, at the price of the run's steps."""
    return max(1, round(price_micro * flops / max(1.0, step_flops)))


def check_model(parameters: int, available: Callable[[], int] = free_memory_bytes) -> None:
    """Raise InvalidRunFile if making and evaluating the model needs more memory than there is."""
    needed_bytes, free = parameters * BYTES_A_PARAMETER, available()
    if needed_bytes > free:
        raise InvalidRunFile(
            f"a model of {parameters / 1e6:,.0f} million parameters needs about "
            f"{needed_bytes / GB:,.1f} GB of memory to be "
            f"made and evaluated here, and {free / GB:,.1f} GB are available: make [model] "
            "smaller, or give the "
            "coordinator a larger machine"
        )

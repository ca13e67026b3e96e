"""The commands `coordinator run`: create, start, watch, change and export runs."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from coordinator.admin.command import (
    ConfirmedRequest,
    EmptyRequest,
    NameRequest,
    ReasonedRequest,
)
from coordinator.cli.listing import as_json, facts, table, when, write_csv
from coordinator.cli.target import HERE, TargetOptions, Where, call, listed
from shared.errors import BadRequest, InvalidRunFile, why
from shared.files.text_file import read_text
from shared.programs.progress_line import ProgressLine
from shared.protocol.limits import process_on
from shared.text import (
    counted,
    credit,
    duration,
    measure_word,
    measured,
    printable,
    size,
    sparkline,
    whole_percent,
)
from shared.workloads.declaration import MEASURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.admin.runs import CreatedRun, ExportRun
    from coordinator.database.standings import CostOfChecks
    from coordinator.database.statistics import VolunteerSummary
    from coordinator.merging.rollback_proposal import Proposal
    from coordinator.rules.machine_time import MachineTime
    from coordinator.runs.export import Exported
    from coordinator.runs.member_figures import MemberFigures
    from coordinator.runs.queries import DecidedCounts, ExperienceFigures
    from coordinator.runs.wind_down import Deed
    from shared.protocol.accounts import RunInfo
    from shared.protocol.versions import VersionInfo
    from shared.sentences import Sentence

Json = Annotated[bool, Parameter(help="As JSON, for machines.", negative="")]
Run = Annotated[str, Parameter(help="Name of the run.", name="--run")]
Yes = Annotated[bool, Parameter(help="Do it.", negative="")]
Reason = Annotated[str, Parameter(help="The reason, for the record.")]
REPORT = ("nickname", "label", "state", "first_seen", "last_seen", "accepted", "merged", "rejected")
TOTALS = ("device_seconds", "credits_earned", "credits_pending")

DOWNLINKS = {
    "chain": "chain: quantised differences between versions, and compressed whole versions",
    "float32": "float32: whole files",
}

app = App(name="run", help="Runs: create, start, pause, roll back, export.")


@app.command
def create(
    file: Annotated[
        Path | None, Parameter(help="The run file (TOML); with --recipe the one to write.")
    ] = None,
    *,
    example: Annotated[
        bool, Parameter(help="A small GPT on Python's own source.", negative="")
    ] = False,
    recipe: Annotated[str, Parameter(help="Write a commented run file to begin from.")] = "",
    list: Annotated[bool, Parameter(help="List the recipes.", negative="")] = False,
    where: TargetOptions = HERE,
) -> None:
    """Check a run file and store it as a draft; or write one to begin from."""
    if recipe or list:
        if example or (recipe and list) or (list and file):
            raise BadRequest("give one of a run file, --recipe, --list and --example")
        _list_recipes(where.json) if list else _write_recipe(recipe, file, where.json)
        return
    if (file is None) != example:
        raise BadRequest("give a run file, --recipe NAME, or --example")
    from coordinator.admin import runs as commands

    if example:
        if not where.json:
            print("Building the example's dataset and tokenizer: about ten seconds.", flush=True)
        with ProgressLine(sys.stdout) if not where.json else nullcontext():
            draft = call(where, commands.create, commands.CreateRun(example=True))
    else:
        text = _read(file or Path())
        try:
            draft = call(where, commands.create, commands.CreateRun(text=text))
        except InvalidRunFile as error:
            joint = ", " if error.message.startswith("line ") else ": "
            raise InvalidRunFile(f"{file}{joint}{error.message}") from error
    if where.json:
        as_json({**_plain(draft.run), "advice": draft.advice})
    else:
        _say_stored(draft, where)


def _say_stored(draft: CreatedRun, where: Where) -> None:
    """Print the needs and the promises of a stored run, and the advice on its file."""
    run = draft.run
    print(
        f'The run "{run.name}" is stored: {run.parameters:,} parameters, '
        f"{f'on {run.dataset}' if run.dataset else 'no dataset needed'}."
    )
    if run.origin:
        print(f"It begins from {_origin(run)}.")
    print(
        f"A machine needs about {size(process_on('cpu', run.memory_bytes))} of memory, or "
        f"{size(run.memory_bytes)} of a GPU's."
    )
    if run.streamed_bytes:
        print(
            f"A GPU with {size(run.streamed_bytes)} streams the blocks of the model from the "
            "machine's memory."
        )
    if run.members is not None:
        print(
            f"Its data stays with its members, who add theirs with `volunteer data add {run.name} "
            "PATH`: you get updates, losses and numbers of samples. Nobody else can do their work "
            "again, so it is never checked by recomputing: invite people whom you trust."
        )
        if run.members.least > 1:
            print(
                f"Each version mixes the updates of {run.members.least} members at least: the run "
                "waits until so many have submitted theirs."
            )
    if run.privacy is not None:
        print(
            f"Its merges add noise of {run.privacy.noise:.3g} times the influence of one member: "
            f"{run.privacy.explained}."
        )
    for sentence in draft.advice:
        print(f"Beware: {sentence}.")
    print(where.hint(f"Next: `coordinator run start {run.name}`"))


def _origin(run: RunInfo) -> str:
    fetched = f", {size(run.origin_bytes)} to fetch once" if run.origin_bytes else ""
    return f"{run.origin} ({run.origin_licence or 'no licence stated'}{fetched})"


def _list_recipes(json: bool) -> None:
    from coordinator.runs.run_recipe import recipes

    entries = recipes()
    if json:
        as_json([{"name": recipe.name, "about": recipe.about} for recipe in entries])
        return
    table(entries, {"recipe": lambda r: r.name, "": lambda r: r.about}, "")
    print("\nNext: `coordinator run create --recipe NAME`")


def _write_recipe(name: str, file: Path | None, json: bool) -> None:
    from coordinator.runs.run_recipe import write_recipe

    path = write_recipe(name, file)
    if json:
        as_json({"recipe": name, "file": str(path)})
        return
    print(f"The recipe is in {path}. Put your own names and folders there and here:\n")
    for line in path.expanduser().read_text(encoding="utf-8").splitlines():
        if line.startswith("#   coordinator "):
            print(line.removeprefix("#").rstrip())


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"the run file {file} cannot be read: {why(error)}") from error


@app.command
def start(name: Run, *, where: TargetOptions = HERE) -> None:
    """Make version 0 and hand out tasks."""
    from coordinator.admin import runs as commands

    _moved(call(where, commands.start, NameRequest(name=name)), where.json)
    if not where.json:
        print(
            where.hint(
                f"Next: `volunteer join LINK` on each machine; `coordinator run show {name}`"
            )
        )


@app.command
def pause(name: Run, *, reason: Reason = "", where: TargetOptions = HERE) -> None:
    """Hand out no more tasks; running ones are finished and merged."""
    from coordinator.admin import runs as commands

    request = ReasonedRequest(name=name, reason=reason)
    _moved(call(where, commands.pause, request), where.json)


@app.command
def resume(name: Run, *, reason: Reason = "", where: TargetOptions = HERE) -> None:
    """Hand out tasks again."""
    from coordinator.admin import runs as commands

    request = ReasonedRequest(name=name, reason=reason)
    _moved(call(where, commands.resume, request), where.json)


@app.command
def stop(
    name: Run,
    *,
    reason: Reason = "",
    yes: Yes = False,
    where: TargetOptions = HERE,
) -> int:
    """End the run for good; accepted work is paid. Without --yes nothing is done."""
    from coordinator.admin import runs as commands

    if not yes:
        state = call(where, commands.show, NameRequest(name=name)).run.state
        if state not in ("running", "paused"):
            raise BadRequest(
                f'the run "{name}" is {state}: only a running or paused one is stopped'
            )
        return preview(f'the run "{name}" would end for good; accepted work is paid', where.json)
    request = ReasonedRequest(name=name, reason=reason)
    _moved(call(where, commands.stop, request), where.json)
    return 0


@app.command
def delete(name: Run, *, yes: Yes = False, where: TargetOptions = HERE) -> int:
    """Delete a draft, or the files of a run that ended. Only a preview, without --yes."""
    from coordinator.admin import runs as commands

    request = ConfirmedRequest(name=name, yes=yes)
    return deed(call(where, commands.delete, request), where.json)


@app.command
def extend(
    name: Run,
    *,
    versions: Annotated[int, Parameter(help="End at this version.")] = 0,
    passes: Annotated[int, Parameter(help="End after this many passes.")] = 0,
    tokens: Annotated[int, Parameter(help="End after this many tokens.")] = 0,
    date: Annotated[str, Parameter(help="End at this date (UTC).")] = "",
    yes: Yes = False,
    where: TargetOptions = HERE,
) -> int:
    """Change where a run ends; a completed run resumes. Only a preview, without --yes."""
    from coordinator.admin import runs as commands
    from coordinator.rules.run_file import StopSettings

    stop = StopSettings(versions=versions, passes=passes, tokens=tokens, date=date)
    request = commands.ExtendRun(name=name, stop=stop, yes=yes)
    return deed(call(where, commands.extend, request), where.json)


@app.command
def fork(
    name: Annotated[str, Parameter(help="Name of the new run.")],
    *,
    source: Annotated[str, Parameter(name="--from", help="A version, like my-run@40.")],
    yes: Yes = False,
    where: TargetOptions = HERE,
) -> int:
    """Make a draft from a run's file and one of its versions. Only a preview, without --yes."""
    from coordinator.admin import runs as commands

    request = commands.ForkRun(name=name, source=source, yes=yes)
    return deed(call(where, commands.fork, request), where.json)


@app.command
def diff(
    first: Annotated[str, Parameter(help="Name of a run.")],
    second: Annotated[str, Parameter(help="Name of the other run.")],
    *,
    where: TargetOptions = HERE,
) -> None:
    """List the keys that differ between two run files, and the progress of both runs."""
    from coordinator.admin import runs as commands

    listed(
        where,
        commands.diff,
        commands.DiffRuns(first=first, second=second),
        {
            "key": lambda d: d.key,
            first: lambda d: d.first,
            second: lambda d: d.second,
        },
        "They do not differ.",
    )


@app.command
def rollback(
    name: Run,
    *,
    to: Annotated[int, Parameter(help="The version to go back to.")],
    reason: Reason = "",
    where: TargetOptions = HERE,
) -> None:
    """Make an old version the newest one again. History and credits stay."""
    from coordinator.admin import runs as commands

    run = call(where, commands.rollback, commands.Rollback(name=name, to=to, reason=reason))
    _moved(run, where.json, f", which is version {to} again")


def _moved(run: RunInfo, json: bool, more: str = "") -> None:
    if json:
        as_json(_plain(run))
    else:
        at = f" at version {run.version}" if run.version >= 0 else ""
        print(f'The run "{run.name}" is {run.state}{at}{more}.')


def _plain(run: RunInfo) -> dict[str, object]:
    """Return a run's fields for JSON. The version is None for a run that was not started; the
    protocol writes -1.
    """
    import msgspec

    plain: dict[str, object] = msgspec.to_builtins(run)
    return plain | {"version": run.version if run.version >= 0 else None}


@app.command(name="list")
def listing(*, where: TargetOptions = HERE) -> None:
    """Every run."""
    from coordinator.admin import runs as commands

    runs = call(where, commands.listing, EmptyRequest())
    if where.json:
        as_json([_plain(run) for run in runs])
        return
    table(
        runs,
        {
            "name": lambda r: r.name,
            "state": lambda r: r.state,
            "workload": lambda r: r.workload,
            "version": lambda r: r.version if r.version >= 0 else None,
            "loss": lambda r: r.loss,
            "workers": lambda r: r.workers,
            "progress": lambda r: "-" if r.progress is None else f"{whole_percent(r.progress)} %",
        },
        where.hint("No run yet: `coordinator run create --example`"),
    )


@app.command
def show(name: Run, *, where: TargetOptions = HERE) -> None:
    """One run with its newest versions."""
    import msgspec

    from coordinator.admin import runs as commands

    details = call(where, commands.show, NameRequest(name=name))
    run = details.run
    if where.json:
        as_json(msgspec.to_builtins(details) | {"run": _plain(run)})
        return
    facts(
        [
            ("run", run.name),
            ("state", run.state),
            ("does not go on", run.standstill.sentence if run.standstill else None),
            ("about", run.description),
            ("workload", f"{run.workload} {run.workload_version}, {run.parameters:,} parameters"),
            ("begins from", _origin(run) if run.origin else None),
            ("dataset", run.dataset),
            ("licence", run.licence),
            ("version", run.version if run.version >= 0 else "none yet"),
            (measure_word(run.measure), _measured(run)),
            ("bits a byte", _bits(run)),
            ("workers", run.workers),
            ("steps", run.steps),
            ("ends", f"about {when(run.ends_at)}, by its pace" if run.ends_at else None),
            (run.items, run.tokens),
            ("credits", f"{run.credits_per_step:g} a step"),
            ("merge", run.merging),
            *_members(details.members),
            ("mixed", _mixed(run)),
            ("experience", _experience(details.experience)),
            *_curves(details.experience),
            ("contributions", _contributions(details.contributions, details.checks)),
            ("machines' time", _machine_time(details.time)),
            ("privacy", run.privacy.explained if run.privacy else None),
            ("up", details.codec),
            ("down", DOWNLINKS.get(details.downlink, details.downlink)),
            ("rule", details.rule),
            ("gate", "versions are evaluated before they are published" if details.gate else None),
            ("checks", None if details.checks is None else _checked(details.checks)),
            ("drift", details.drift),
            ("beware", "; ".join(details.advice) or None),
            ("heal", None if details.heal is None else _healed(details.heal, where)),
        ]
    )
    _suites(run)
    print()
    print_versions(details.versions, by_members=bool(details.members and details.members.best_by))


def _mixed(run: RunInfo) -> str | None:
    """Return the fewest members in a version of members' data; None if one may be alone."""
    least = run.members.least if run.members else 0
    return f"each version of {least} members at least" if least > 1 else None


def _measured(run: RunInfo) -> str | None:
    if run.loss is None or run.loss_first is None:
        return None
    now, first = (measured(value, run.measure) for value in (run.loss, run.loss_first))
    return f"{now} (first {first})"


def print_versions(versions: Sequence[VersionInfo], *, by_members: bool = False) -> None:
    """Print versions as a table, with a note if the best version is not that of the lowest loss,
    unless the members chose it (`by_members`).
    """
    table(
        versions,
        {
            "version": lambda v: v.version,
            "kind": lambda v: v.kind,
            "made": lambda v: when(v.created_at),
            "from": lambda v: v.contributions,
            "loss": lambda v: v.loss if v.loss is not None else v.evaluation,
            "best": lambda v: "*" if v.best else "",
        },
        "No version yet.",
    )
    if not by_members and (note := best_note(versions)):
        print(note)


def best_note(versions: Sequence[VersionInfo]) -> str:
    """Return why the version with the lowest loss is not the best one; "" if it is."""
    best = next((v.loss for v in versions if v.best and v.loss is not None), None)
    if best is None or all(v.loss is None or v.loss >= best for v in versions):
        return ""
    return "* the best: a lower loss replaces it only once the difference is significant"


def _members(figures: MemberFigures | None) -> list[tuple[str, str | None]]:
    """Return the figures of the data that members keep, and of the losses that they measured; no
    figure names a member.
    """
    if figures is None:
        return []
    loss = figures.newest
    people = f"{counted(figures.members, 'member')} on {counted(figures.machines, 'machine')}"
    amounts = f"{figures.samples:,} samples, {figures.items:,} items, {figures.heldout:,} held out"
    measured_by = None
    if loss is not None:
        measured_by = (
            f"mean {loss.mean:.4f}, worst {loss.worst:.4f}, spread {loss.spread:.4f} over "
            f"{counted(loss.members, 'member')} at version {loss.version}"
        )
    weights = f"by samples, no member above {figures.cap:g} times its equal share"
    if figures.best_by is None:
        weights = "alike for all accounts"
    best = figures.best
    choice = None if best is None else f"version {best.version}, by the {figures.best_by} over them"
    return [
        ("data", f"stays with its members: {people}, {amounts}"),
        ("weights", weights),
        ("members' loss", measured_by),
        ("best", choice),
    ]


def _experience(figures: ExperienceFigures | None) -> str | None:
    """Return the episodes of a run, their rate, and how often learners used them."""
    if figures is None:
        return None
    per_episode, used = (
        figures.samples / max(1, figures.made),
        figures.learnt / max(1, figures.samples),
    )
    signal = None if figures.signal is None else f"{figures.signal:.0%} of them teach something"
    behind = None if figures.behind is None else f"{figures.behind:.1f} versions behind"
    speed = (
        None if figures.tokens_per_s is None else f"{figures.tokens_per_s:,.0f} tokens/s an actor"
    )
    learner_speed = (
        None if figures.learnt_per_s is None else f"{figures.learnt_per_s:,.0f} a learner"
    )
    parts = (
        f"{figures.made:,} {figures.unit}s, {figures.an_hour:,.0f} an hour",
        signal or f"{per_episode:.1f} samples each",
        f"learnt from {used:.1f} times",
        behind,
        ", ".join(part for part in (speed, learner_speed) if part),
    )
    return "; ".join(part for part in parts if part)


def _curves(figures: ExperienceFigures | None) -> list[tuple[str, str]]:
    """Return the curves of a run's judged answers over its versions, with their newest and first
    values.
    """
    if figures is None or not figures.rollouts:
        return []
    points = figures.rollouts
    curves = {
        "reward": ([point.reward for point in points], "{:.3f}"),
        "entropy": ([point.entropy for point in points], "{:.3f} nats a token"),
        "length": ([point.length for point in points], "{:,.1f} tokens"),
        "cut off": ([100 * point.cut for point in points], "{:.1f} % of answers"),
    }
    return [
        (name, f"{form.format(curve[-1])} (first {form.format(curve[0])})  {sparkline(curve)}")
        for name, (curve, form) in curves.items()
    ]


def _bits(run: RunInfo) -> str | None:
    """Return the bits per byte of text, newest and first measured; None if unknown."""
    if run.bits is None:
        return None
    first = "" if run.bits_first is None else f" (first {run.bits_first:.4f})"
    return f"{run.bits:.4f}{first}"


def _suites(run: RunInfo) -> None:
    """Print the scores of the task suites for the first and the newest measured version."""
    if not run.suites:
        return
    print()
    table(
        run.suites,
        {
            "suite": lambda s: s.name,
            "examples": lambda s: s.total,
            "asked": lambda s: "by chat template" if s.chat else "plainly",
            "by chance": lambda s: f"{s.chance:.1%}",
            "before": lambda s: s.first and s.first.text,
            "after": lambda s: s.newest and s.newest.text,
            "version": lambda s: None if s.newest is None else s.newest.version,
        },
        "",
    )


def _checked(cost: CostOfChecks) -> str | None:
    """Return the checks that were made, their results, and their seconds."""
    parts = [f"done again: {cost.drawn.words}"] if cost.drawn.words else []
    if cost.played:
        parts.append(f"files of actors: {cost.played}")
    if cost.audits:
        parts.append(
            f"by volunteers: {cost.audits} ({cost.audits_s:,.1f} s of theirs,"
            f" {cost.audits_micro / 1e6:,.2f} credits)"
        )
    if not parts:
        return None
    share = "" if cost.share is None else f" ({cost.share:.1%})"
    return (
        f"{'; '.join(parts)}; {cost.checked_s:,.1f} s beside {cost.work_s:,.1f} s of accepted"
        f" work{share}"
    )


def _contributions(figures: DecidedCounts | None, cost: CostOfChecks | None) -> str | None:
    if figures is None or not figures.accepted + figures.rejected:
        return None
    time = "" if cost is None else f", {duration(cost.work_s)} of device time"
    return f"{figures.accepted:,} found good, {figures.rejected:,} refused{time}"


def _machine_time(time: MachineTime | None) -> str | None:
    """Return the use of the machines' time over the last day: busy, and goodput."""
    if time is None:
        return None
    return f"{time.busy:.0%} at training, goodput {time.goodput:.0%} (merged), over the last day"


def _healed(proposed: Proposal, where: Where) -> str:
    return where.hint(
        f"{proposed.share:.0%} of version {proposed.version} came from accounts suspended since: "
        f"`{proposed.command}`"
    )


@app.command
def rollouts(
    name: Run,
    *,
    version: Annotated[int | None, Parameter(help="Only answers of this version.")] = None,
    limit: Annotated[int, Parameter(help="Most answers.")] = 16,
    where: TargetOptions = HERE,
) -> None:
    """List the newest answers of a run with their rewards; groups of equal rewards are left out."""
    from coordinator.admin import runs as commands

    request = commands.RolloutsRequest(name=name, version=version, limit=limit)
    answers = call(where, commands.rollouts, request)
    if where.json:
        as_json(answers)
        return
    if not answers:
        print("No answer yet that teaches something.")
    for answer in answers:
        end = ", cut off" if answer.cut else ""
        print(
            f"reward {answer.reward:g}  version {answer.version}  problem {answer.problem}  "
            f"{answer.tokens} tokens{end}  {answer.logprob:.2f} nats a token"
        )
        for text in (answer.prompt, answer.answer):
            print(*(f"    {printable(row)}" for row in text.splitlines() or [""]), sep="\n")


@app.command
def report(
    name: Run,
    *,
    csv: Annotated[bool, Parameter(help="As CSV, for a spreadsheet.", negative="")] = False,
    where: TargetOptions = HERE,
) -> None:
    """List the participants of a run: for a class, a paper, a thank-you."""
    from coordinator.admin import runs as commands

    people = call(where, commands.report, NameRequest(name=name))
    if where.json:
        as_json(people)
    elif csv:
        write_report(people)
    else:
        table(
            people,
            {
                "nickname": lambda p: p.nickname,
                "for": lambda p: p.label,
                "state": lambda p: p.state,
                "first seen": lambda p: when(p.first_seen),
                "last seen": lambda p: when(p.last_seen),
                "accepted": lambda p: p.work.accepted,
                "rejected": lambda p: p.work.refused,
                "hours": lambda p: round(p.work.device_s / 3600, 2),
                "credits": lambda p: credit(p.earned_micro),
            },
            "No participant yet.",
        )


def write_report(people: Sequence[VolunteerSummary]) -> None:
    """Write a report as CSV on standard output, with a column for each reason of a rejection."""
    reasons = sorted({reason for person in people for reason in person.work.rejected})
    names = [*REPORT, *(f"rejected_{reason}" for reason in reasons), *TOTALS]
    write_csv([_reported(person) for person in people], names)


def _reported(person: VolunteerSummary) -> dict[str, object]:
    work = person.work
    return {
        "nickname": person.nickname,
        "label": person.label,
        "state": person.state,
        "first_seen": when(person.first_seen, "").removesuffix(" UTC"),
        "last_seen": when(person.last_seen, "").removesuffix(" UTC"),
        "accepted": work.accepted,
        "merged": work.merged,
        "rejected": work.refused,
        **{f"rejected_{reason}": count for reason, count in work.rejected.items()},
        "device_seconds": round(work.device_s, 1),
        "credits_earned": f"{person.earned_micro / 1e6:.6f}",
        "credits_pending": f"{person.pending_micro / 1e6:.6f}",
    }


@app.command
def export(
    name: Annotated[str, Parameter(name="--run", help="A run, or a version of it: my-run@40.")],
    *,
    to: Annotated[str, Parameter(help="A new or empty folder, or hub:OWNER/NAME.")],
    version: Annotated[int | None, Parameter(help="Version to export (default: the best).")] = None,
    format: Annotated[
        str,
        Parameter(help="safetensors; transformers, peft or gguf for text; onnx."),
    ] = "safetensors",
    dtype: Annotated[
        str,
        Parameter(
            help="float32, bfloat16 or float16 (default: with transformers the type of the model "
            "that the run started from, else float32)."
        ),
    ] = "",
    where: TargetOptions = HERE,
) -> None:
    """Write a version as safetensors with a model card, or for another library; or publish it on a
    model hub, private at first.
    """
    from coordinator.admin.runs import ExportRun
    from coordinator.runs.model_hub import PREFIX

    request = ExportRun(name=name, version=version, format=format, dtype=dtype)
    if to.startswith(PREFIX):
        done = _published(where, request, to)
    else:
        done = _exported(where, request, Path(to).expanduser().absolute())
    if where.json:
        as_json(done)
        return
    for remark in done.remarks:
        print(remark)
    value = "" if done.loss is None else measured(done.loss, done.measure)
    loss = f", {MEASURES[done.measure]} {value}" if value else ""
    print(f'Version {done.version} of "{done.run}" is in {done.path} ({size(done.bytes)}{loss}).')


def _exported(where: Where, request: ExportRun, to: Path) -> Exported:
    import msgspec

    from coordinator.admin import runs as commands

    if where.remote:
        return _fetched(where, request, to)
    return call(where, commands.export, msgspec.structs.replace(request, to=str(to))).exported


def _published(where: Where, request: ExportRun, to: str) -> Exported:
    import tempfile

    import msgspec

    from coordinator.runs.model_hub import HubRepository

    hub = HubRepository.of(to)  # checked before anything is exported
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        done = _exported(where, request, Path(folder) / "model")
        url = hub.publish(Path(done.path), f'Version {done.version} of "{done.run}"')
    return msgspec.structs.replace(done, path=url)


def _fetched(where: Where, request: ExportRun, to: Path) -> Exported:
    import msgspec

    from coordinator.admin import runs as commands
    from shared.files.new_folder import new_folder

    remarks: list[Sentence] = []
    with new_folder(to, "the export", tell=remarks.append) as unfinished:
        reply = call(where, commands.export, request)
        connection = where.connection()
        for file in reply.exported.files:
            connection.get(reply.box, file, unfinished / Path(file).name)
    done = reply.exported
    return msgspec.structs.replace(done, path=str(to), remarks=tuple(map(str, remarks)))


def preview(sentence: str, json: bool) -> int:
    """Print the effect of a command that cannot be undone, without doing it; return exit code 1."""
    from coordinator.runs.wind_down import Deed

    return deed(Deed(says=(sentence,), done=False), json)


def deed(done: Deed, json: bool) -> int:
    """Print the effect of a command, done or only previewed; return exit code 1 for a preview."""
    if json:
        as_json(done)
    else:
        for sentence in done.says:
            print(sentence)
        if not done.done:
            print("Nothing was changed: say --yes to do it.")
    return 0 if done.done else 1


def add_to(parent: App) -> None:
    parent.command(app)

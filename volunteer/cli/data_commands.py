"""The commands `volunteer data`: own files for runs whose data stay with their members."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from shared.errors import BadRequest, NotFound, VolunteerError
from shared.files.source_paths import existing_path
from shared.nearest_name import hint
from shared.programs.interrupts import interrupt_on_end_signals
from shared.programs.progress_line import ProgressLine
from shared.sentences import Sentence
from shared.text import printable
from volunteer.cli.exit_codes import (
    ASKS_NOTHING,
    EXIT_FAILURE,
    at_terminal,
    confirm,
    remark,
    with_profile,
)
from volunteer.cli.json_output import print_json, print_table
from volunteer.cli.options import Json, Profile, Yes
from volunteer.i18n.catalogue import N_, _, ngettext, number, translated

if TYPE_CHECKING:
    from volunteer.account.membership import MemberRun, MemberTerms, OwnSources
    from volunteer.settings.settings import Directories
    from volunteer.storage.own_data import OwnBuild, OwnData, OwnRecord

SKIPPED_SHOWN = 20

Run = Annotated[str, Parameter(help="A run that learns from its members' own data.")]

app = App(name="data", help="Files of your own that a run may learn from; they stay here.")

STAGES = {
    "reading": N_("Reading your files."),
    "writing": N_("Preparing them on this machine."),
    "judge": N_("Preparing the measure of pictures: up to two minutes."),
}


@app.command
def add(
    run: Run,
    *paths: Annotated[Path, Parameter(help="Files and folders; they are read, never sent.")],
    column: Annotated[
        str, Parameter(help='Column or key that holds the text of tables and records ("text").')
    ] = "",
    yes: Yes = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Let a run learn from your files on this machine; earlier ones are replaced."""
    from volunteer.account.membership import OwnSources

    if not paths:
        raise BadRequest(
            Sentence("name the files or folders to learn from: `volunteer data add RUN PATH`")
        )
    if json and not yes:
        raise BadRequest(ASKS_NOTHING)
    sources = OwnSources(paths=[existing_path(path) for path in paths], column=column)
    addition = _Addition(run, sources, profile)
    return addition.carry_out(yes=yes, json=json)


class _Addition:
    """Execution of `volunteer data add` for one run."""

    def __init__(self, name: str, sources: OwnSources, profile: str) -> None:
        from shared.workloads.data.skipped_files import Skipped
        from volunteer.account.profile_directory import Profile as ProfileDirectory
        from volunteer.cli.start import identity_of
        from volunteer.settings import settings
        from volunteer.storage.own_data import OwnData

        self._name, self._sources, self._profile = name, sources, profile
        self._places = settings.directories(profile=profile)
        self._identity = identity_of(self._places)
        home = ProfileDirectory(self._places.profile).home(self._identity)
        self._own = OwnData(home.own_data)
        self._skipped = Skipped()

    def carry_out(self, *, yes: bool, json: bool) -> int:
        """Build the data, show all that will be sent, declare the numbers if the person agrees.
        Return the exit code.
        """
        run = self._run()
        with interrupt_on_end_signals(), self._own.building(run.name) as target:
            record = self._build(run, target, json=json)
            if not json:
                self._show(run, record)
                if not (yes or at_terminal()):
                    raise BadRequest(
                        Sentence("nothing was added: without a terminal to agree in, add --yes")
                    )
                if not (yes or confirm(N_("Take part with these files?"))):
                    print(_("nothing was added, and the copies are deleted"))
                    return EXIT_FAILURE
            record = self._own.use(record)
        declared = self._declare(record)
        at_work = asyncio.run(_recount(self._places))
        if json:
            print_json(
                _fields(record)
                | {
                    "declared": declared,
                    "files": self._skipped.read,
                    "left_out": self._skipped.sentences,
                    "copies": _copy_count(record),
                }
            )
            return 0
        if declared and at_work:
            print(_("added; it is used from the next task on"))
        else:
            print(with_profile(_("added; now: `volunteer`, or `volunteer --no-ui`"), self._profile))
        return 0

    def _run(self) -> MemberRun:
        from volunteer.account.membership import member_run
        from volunteer.cli.start import ask_coordinator
        from volunteer.settings import settings

        enabled = settings.load(path=self._places.config / "config.toml").settings.workloads
        key = self._identity.public_key
        return asyncio.run(
            ask_coordinator(self._places, lambda api: member_run(api, self._name, key, enabled))
        )

    def _build(self, run: MemberRun, target: OwnBuild, *, json: bool) -> OwnRecord:
        from volunteer.account.membership import build
        from volunteer.storage.own_data import OwnRecord

        with _stages(silent=json) as tell:
            manifest, numbers = build(run, self._sources, target, self._skipped, tell)
        return OwnRecord(
            run=run.name,
            build=target.folder.name,
            manifest=manifest,
            numbers=numbers,
            at=time.time(),
        )

    def _show(self, run: MemberRun, record: OwnRecord) -> None:
        """Print the counts of files, the reasons of skipped files, and the lines of
        `data_lines`.
        """
        if self._skipped.read:
            print(ngettext("{n} file was read", "{n} files were read", self._skipped.read))
        if copies := _copy_count(record):
            print(ngettext("left out: {n} exact copy", "left out: {n} exact copies", copies))
        for sentence in self._skipped.sentences[:SKIPPED_SHOWN]:
            print(printable(_("left out: {sentence}", sentence=sentence)))
        more = self._skipped.count - SKIPPED_SHOWN
        if more > 0:
            print(ngettext("left out: {n} more", "left out: {n} more", more))
        for line in data_lines(record, self._own.place(record.run), run.terms):
            print(printable(line))
        print(
            with_profile(_("`volunteer data remove {run}` ends it", run=record.run), self._profile)
        )

    def _declare(self, record: OwnRecord) -> bool:
        """Send the numbers; return False if the coordinator does not answer now."""
        from volunteer.account.membership import declare
        from volunteer.cli.start import ask_coordinator
        from volunteer.net.retry import is_temporary

        try:
            asyncio.run(ask_coordinator(self._places, lambda api: declare(api, record)))
        except VolunteerError as error:
            if not is_temporary(error):
                self._own.remove(record.run)  # the run does not take these data
                raise
            remark(
                _(
                    "the coordinator does not answer ({error}): its numbers are sent when the "
                    "volunteer starts next",
                    error=translated(error.message),
                )
            )
            return False
        return True


def data_lines(record: OwnRecord, place: Path, terms: MemberTerms) -> list[str]:
    """Return the lines about own data: numbers, all that leaves the machine, terms, folder."""
    from volunteer.i18n.formats import size

    numbers = record.numbers
    figures = {
        "samples": number(numbers.samples, ","),
        "items": number(numbers.items, ","),
        "heldout": number(numbers.heldout, ","),
    }
    match record.manifest.kind:
        case "images":
            count = _("{items} pictures to learn from", **figures)
        case "tokens" | "chat-tokens":
            words = N_("{items} words or parts of words to learn from, in {samples} pieces")
            count = _(words, **figures)
        case _:
            count = _("{samples} pieces to learn from", **figures)
    counts = N_(
        "how much there is: {samples}, {items}, {heldout}; and a random mark of these copies"
    )
    return [
        _('Your data for the run "{run}":', run=record.run),
        f"  {count}",
        "  " + _("{heldout} more pieces are kept back, only to measure how good it is", **figures),
        _("This is all that leaves the machine about them:"),
        "  " + _("what was learnt: changes of the model's numbers, each from many pieces"),
        "  " + _("how well the model fits them, and those kept back: single numbers"),
        "  " + _(counts, **figures),
        _("No text, picture, word or name of a file leaves it, nor how many files there are."),
        *_terms(terms),
        _("The prepared copies are {size} in {path}", size=size(record.size), path=place),
    ]


def _terms(terms: MemberTerms) -> list[str]:
    """Return the lines about the organiser's view of the changes, and the published model."""
    if terms.least > 1:
        mixed = ngettext(
            "A new model mixes the changes of {n} account at least.",
            "A new model mixes the changes of {n} accounts at least.",
            terms.least,
        )
    elif terms.quorum > 1:
        mixed = ngettext(
            "A new model usually mixes the changes of {n} machine: of fewer while fewer take part, "
            "even of yours alone.",
            "A new model usually mixes the changes of {n} machines: of fewer while fewer take "
            "part, even of yours alone.",
            terms.quorum,
        )
    else:
        mixed = _("A new model may hold your changes alone: they are not mixed with others'.")
    if terms.privacy is None:
        noise = _("No noise is added that would hide what is yours.")
    else:
        noise = _(
            "Noise is added before it is published: epsilon {epsilon} over the whole run (less "
            "hides more).",
            epsilon=number(terms.privacy.budget, "g"),
        )
    return [
        _("What becomes of it:"),
        "  "
        + _("The organiser sees those changes, which can still tell something about your data."),
        f"  {mixed}",
        f"  {noise}",
        "  "
        + _(
            "The model is published under {licence}.",
            licence=terms.licence or _("no licence stated"),
        ),
    ]


def _copy_count(record: OwnRecord) -> int:
    """Return the number of exact copies that were left out."""
    return int(record.manifest.meta.get("copies", 0))


@app.command(name="list")
def listing(*, json: Json = False, profile: Profile = "") -> int:
    """Your data on this machine, by run."""
    from volunteer.i18n.formats import size

    records = _own_data(profile).records()
    if json:
        return print_json([_fields(record) for record in records])
    if not records:
        print(with_profile(_("no data of your own yet: `volunteer data add RUN PATH`"), profile))
        return 0
    names = [_("run"), _("pieces"), _("words or pictures"), _("kept back"), _("size"), _("added")]
    rows = [
        [
            record.run,
            number(record.numbers.samples, ","),
            number(record.numbers.items, ","),
            number(record.numbers.heldout, ","),
            size(record.size),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(record.at)),
        ]
        for record in records
    ]
    print_table(names, rows, {1, 2, 3, 4})
    return 0


@app.command
def remove(run: Run, *, json: Json = False, profile: Profile = "") -> int:
    """Delete the copies of your data for a run; your files stay."""
    from volunteer.account.membership import withdraw
    from volunteer.cli.start import ask_coordinator
    from volunteer.settings import settings

    places = settings.directories(profile=profile)
    data = _own_data(profile)
    names = [record.run for record in data.records()]
    removed = data.remove(run)
    withdrawn = True
    try:
        asyncio.run(ask_coordinator(places, lambda api: withdraw(api, run)))
    except VolunteerError as error:
        withdrawn = False
        if names and not removed and isinstance(error, NotFound):
            raise NotFound(
                Sentence(
                    "there are no data of yours for {run}: {hint}", run=run, hint=hint(run, names)
                )
            ) from error
        remark(_("the coordinator was not told: {error}", error=translated(error.message)))
    asyncio.run(_recount(places))
    if json:
        return print_json({"run": run, "removed": removed, "withdrawn": withdrawn})
    print(
        _("the copies are deleted; your files stay, and what was learnt stays in the model")
        if removed
        else _("there were no data of yours for {run}", run=printable(run))
    )
    return 0


def _own_data(profile: str) -> OwnData:
    """Return the own data of a profile. Raises Configuration without an account."""
    from volunteer.account.profile_directory import Profile as ProfileDirectory
    from volunteer.cli.start import identity_of
    from volunteer.settings import settings
    from volunteer.storage.own_data import OwnData

    places = settings.directories(profile=profile)
    return OwnData(ProfileDirectory(places.profile).home(identity_of(places)).own_data)


def _fields(record: OwnRecord) -> dict[str, object]:
    """Return own data as fields of a JSON document."""
    return {
        "run": record.run,
        "samples": record.numbers.samples,
        "items": record.numbers.items,
        "heldout": record.numbers.heldout,
        "bytes": record.size,
        "at": record.at,
    }


async def _recount(places: Directories) -> bool:
    """Let this profile's running volunteer count the data again, and claim at once; return False if
    no volunteer runs.
    """
    from shared.clock import SystemClock
    from volunteer.account.profile_directory import Profile as ProfileDirectory
    from volunteer.control.commands import Retry
    from volunteer.control.local_socket import attach

    with suppress(VolunteerError):
        async with attach(ProfileDirectory(places.profile).endpoint, SystemClock()) as control:
            await control.do(Retry())
            return True
    return False


@contextmanager
def _stages(*, silent: bool) -> Iterator[Any]:
    """Report the stages of a build, each once, and its progress."""
    if silent:
        yield lambda _: None
        return
    with ProgressLine(sys.stdout) as line:
        line.say(_(STAGES["reading"]))
        stages = {"reading"}

        def tell(now: Any) -> None:
            if now.stage not in stages and now.stage in STAGES:
                stages.add(now.stage)
                line.say(_(STAGES[now.stage]))
            line.tell(now.done, now.total)

        yield tell

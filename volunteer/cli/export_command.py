"""`volunteer export`: a version of a run over members' data, taken home by a member, as it is or
trained further on the member's data.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from shared.errors import BadRequest
from shared.programs.interrupts import interrupt_on_end_signals
from shared.programs.progress_line import ProgressLine
from shared.sentences import Sentence
from shared.text import printable
from volunteer.cli.exit_codes import remark, with_profile
from volunteer.cli.json_output import print_json
from volunteer.cli.options import Json, Profile
from volunteer.i18n.catalogue import _, ngettext, number, translated

if TYPE_CHECKING:
    from volunteer.cli.home_version import HomeVersion, VersionChoice
    from volunteer.net.api import Api
    from volunteer.settings.settings import Directories, Settings
    from volunteer.training.own_copy import OwnCopy

PASSES_MAX = 100

Tell = Callable[[int, int], None]  # finished bytes or steps, and all


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """Shows the stages of an export, and the progress of each."""

    say: Callable[[str], None]
    bytes: Tell
    steps: Tell


class TakenHome(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a version that a member took home, and its losses on the member's data."""

    run: str
    version: int
    path: str
    files: tuple[str, ...]
    tuned: bool
    passes: int = 0
    steps: int = 0
    loss_before: float | None = None  # on the held-out part of the member's data
    loss_after: float | None = None


def export(
    run: Annotated[str, Parameter(help="A run that learns from its members' own data.")],
    *,
    tune: Annotated[
        bool, Parameter(help="Train the copy further on your data; it stays here.", negative="")
    ] = False,
    passes: Annotated[
        int | None,
        Parameter(
            help="With --tune: how often it goes through your data (default: once).",
            validator=Number(gte=1, lte=PASSES_MAX),
        ),
    ] = None,
    version: Annotated[
        int | None, Parameter(help="Version; default: the newest.", validator=Number(gte=0))
    ] = None,
    to: Annotated[Path | None, Parameter(help="A new folder; default: in ~/volunteer.")] = None,
    format: Annotated[
        str, Parameter(help="safetensors, or a format of another library such as gguf.")
    ] = "safetensors",
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Take a model home that learnt from your data too; --tune makes a copy of your own."""
    from volunteer.cli.home_version import VersionChoice
    from volunteer.cli.start import identity_of
    from volunteer.settings import settings

    if passes is not None and not tune:
        raise BadRequest(Sentence("--passes is for --tune, which trains the copy on your data"))
    places = settings.directories(profile=profile)
    options = settings.load(path=places.config / "config.toml").settings
    choice = VersionChoice(
        run=run,
        version=version,
        format=format,
        public_key=identity_of(places).public_key,
        enabled=options.workloads,
    )
    export = _Export(places, options, choice, passes=(passes or 1) if tune else 0)
    with interrupt_on_end_signals(), _progress(silent=json) as watch:
        home_copy = export.carry_out(to, watch)
    if json:
        return print_json(home_copy)
    for line in lines(home_copy):
        print(printable(with_profile(line, profile)))
    return 0


def lines(home_copy: TakenHome) -> list[str]:
    """Return the lines that a person reads at the end."""
    written = _(
        "version {version} of {run} is in {path}",
        version=home_copy.version,
        run=home_copy.run,
        path=home_copy.path,
    )
    if not home_copy.tuned:
        more = _("`volunteer export {run} --tune` trains a copy on your data", run=home_copy.run)
        return [written, more]
    if home_copy.loss_before is None or home_copy.loss_after is None:
        measured = _("the part of your data that is kept back is too small to measure it")
    else:
        measured = _(
            "how far it is from your data that were kept back: {before} before, {after} now "
            "(less is better)",
            before=number(home_copy.loss_before, ".4f"),
            after=number(home_copy.loss_after, ".4f"),
        )
    secret = _(
        "this copy has learnt from your own files and may repeat parts of them: keep it as "
        "carefully as those"
    )
    return [written, measured, secret]


def _tell(sentence: Sentence) -> None:
    remark(translated(sentence))


class _Export:
    """Execution of `volunteer export`; with 0 passes, the version is not trained further."""

    def __init__(
        self, places: Directories, settings: Settings, choice: VersionChoice, *, passes: int
    ) -> None:
        self._places, self._settings = places, settings
        self._choice, self._passes = choice, passes

    def carry_out(self, to: Path | None, watch: _Watch) -> TakenHome:
        """Fetch the version, train a copy if that is wanted, write its files."""
        from shared.files.new_folder import new_folder
        from volunteer.files import exports, private_directory

        cache = private_directory(self._places.cache)
        with TemporaryDirectory(prefix="export-", dir=cache) as folder:
            watch.say(_("Fetching the model."))
            home = asyncio.run(self._fetched(Path(folder), watch.bytes))
            name = f"{home.info.name}-v{home.source.manifest.version}"
            place = to or exports() / (f"{name}-mine" if self._passes else name)
            place = place.expanduser().absolute()
            # a new folder of a copy that learnt from own files is for its owner alone
            mode = 0o700 if self._passes else 0o777
            with new_folder(place, Sentence("the export"), mode, _tell) as unfinished:
                copy = self._learnt(home, watch)
                watch.say(_("Writing its files into {path}.", path=place))
                self._write(home, copy, unfinished)
                names = tuple(sorted(path.name for path in unfinished.iterdir()))
        return TakenHome(
            run=home.info.name,
            version=home.source.manifest.version,
            path=str(place),
            files=names,
            tuned=self._passes > 0,
            passes=self._passes,
            steps=copy.steps,
            loss_before=copy.before,
            loss_after=copy.after,
        )

    async def _fetched(self, folder: Path, tell: Tell) -> HomeVersion:
        from volunteer.account.profile_directory import Profile as ProfileDirectory
        from volunteer.cli.home_version import fetch
        from volunteer.cli.start import ask_coordinator, identity_of
        from volunteer.storage.own_data import OwnData

        identity = identity_of(self._places)
        own_data = OwnData(ProfileDirectory(self._places.profile).home(identity).own_data)

        async def fetched(api: Api) -> HomeVersion:
            return await fetch(api, self._choice, own_data, folder, tell)

        return await ask_coordinator(self._places, fetched)

    def _learnt(self, home: HomeVersion, watch: _Watch) -> OwnCopy:
        """Return the trained copy; with 0 passes, the version's own weights."""
        from shared.clock import SystemClock
        from volunteer.machine.devices import choose, default_threads, detect
        from volunteer.training.own_copy import OwnCopy, read_weights, train_copy
        from volunteer.training.trainer import Trainer

        source = home.source
        if not self._passes:
            return OwnCopy(weights=read_weights(source))
        threads = self._settings.threads or default_threads()
        trainer = Trainer("export", threads=threads, clock=SystemClock())
        trainer.start()
        try:
            watch.say(
                ngettext(
                    "Training a copy on your data in {n} step; Ctrl-C ends it, and nothing is "
                    "written.",
                    "Training a copy on your data in {n} steps; Ctrl-C ends it, and nothing is "
                    "written.",
                    self._passes * source.steps,
                )
            )
            device = choose(self._settings.device, trainer.call(detect).result())[0].id
            return train_copy(trainer, replace(source, device=device), self._passes, watch.steps)
        finally:
            trainer.close()

    def _write(self, home: HomeVersion, copy: OwnCopy, to: Path) -> None:
        """Write the files of a model, its licence and its card."""
        from shared.workloads.base import FormatWanted
        from shared.workloads.model_files import convert_version, write_model
        from volunteer.cli.home_version import write_papers

        source = home.source
        config = source.manifest.config
        whole = source.workload.whole(config, copy.weights, home.files)
        assets = source.data.manifest.assets
        tokenizer, template = (
            source.data.asset(name).read_bytes() if name in assets else None
            for name in ("tokenizer", "chat_template")
        )
        target = FormatWanted(self._choice.format, tokenizer, template)
        model = convert_version(source.workload, config, whole, target)
        metadata = {"run": home.info.name, "version": str(source.manifest.version)}
        write_model(model, to, metadata)
        write_papers(home, model, to, copy)


@contextmanager
def _progress(*, silent: bool) -> Iterator[_Watch]:
    """Show the stage that runs, and its progress."""
    if silent:

        def ignore(done: int, total: int) -> None:
            pass

        yield _Watch(say=lambda text: None, bytes=ignore, steps=ignore)
        return
    with ProgressLine(sys.stdout) as line:

        def say(text: str) -> None:
            line.tell(0, 0)
            line.say(printable(text))

        def steps(done: int, total: int) -> None:
            line.note(_("step {step} of {steps}", step=number(done, ","), steps=number(total, ",")))

        yield _Watch(say=say, bytes=line.tell, steps=steps)

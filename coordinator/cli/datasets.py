"""The commands `coordinator dataset`: the data that runs train on."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from coordinator.admin.command import ConfirmedRequest, EmptyRequest
from coordinator.cli.listing import as_json
from coordinator.cli.runs import Yes, deed
from coordinator.cli.target import HERE, TargetOptions, Where, call, listed
from shared.errors import BadRequest, InvalidName, InvalidRunFile, VolunteerError
from shared.files.source_paths import existing_path
from shared.programs.progress_line import ProgressLine
from shared.text import counted, size

if TYPE_CHECKING:
    from coordinator.admin.datasets import DatasetShown
    from shared.workloads.data.image_dataset import ImageBuild
    from shared.workloads.data.text_dataset import TextBuild

SKIPPED_SHOWN = 20

app = App(name="dataset", help="Datasets: add and list.")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Options of `coordinator dataset add`."""

    licence: Annotated[str, Parameter(help="Licence of the data, e.g. CC-BY-4.0.")] = ""
    source: Annotated[str, Parameter(help="Origin of the data.")] = ""
    tokenizer: Annotated[Path | None, Parameter(help="A tokenizer.json of your own.")] = None
    vocab_size: Annotated[int | None, Parameter(help="Size of the tokenizer to train.")] = None
    column: Annotated[
        str, Parameter(help='Column or key that holds the text of tables and records ("text").')
    ] = ""
    size: Annotated[int | None, Parameter(help="Side of the stored images, pixels (64).")] = None
    channels: Annotated[int | None, Parameter(help="3 for colour, 1 for grey (3).")] = None
    heldout_share: Annotated[float | None, Parameter(help="Share held out for evaluation.")] = None
    seed: Annotated[int | None, Parameter(help="Seed of the shuffle.")] = None
    workload: Annotated[
        str, Parameter(name="--for", help="Workload that builds the dataset from --files itself.")
    ] = ""
    files: Annotated[
        list[Path] | None,
        Parameter(
            help="Files and folders for --for; causal-lm takes text, dialogues, parquet, arrow.",
            consume_multiple=True,
            negative="",
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        Parameter(help="KEY=VALUE for that workload.", consume_multiple=True, negative=""),
    ] = None
    problems: Annotated[
        list[Path] | None,
        Parameter(
            help="Problems with answers (.jsonl, .json, .csv, .parquet) for the workload rollouts; "
            "--tokenizer names the tokenizer of the model that answers them.",
            consume_multiple=True,
            negative="",
        ),
    ] = None
    suite: Annotated[
        Path | None,
        Parameter(
            help="A suite of examples (.jsonl) to measure language models on, in place of data."
        ),
    ] = None


@app.command
def add(
    name: Annotated[str, Parameter(help="Name used in run files.")],
    *,
    text: Annotated[
        list[Path] | None,
        Parameter(
            help="Text files, folders, or .jsonl.",
            consume_multiple=True,
            negative="",
        ),
    ] = None,
    chat: Annotated[
        list[Path] | None,
        Parameter(
            help="Dialogues as .jsonl, .json, .csv, .parquet or .arrow, written by the chat "
            "template in the folder of --tokenizer; only answers are learnt.",
            consume_multiple=True,
            negative="",
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        Parameter(
            help="PNG and JPEG files, or folders of them.",
            consume_multiple=True,
            negative="",
        ),
    ] = None,
    options: Annotated[DatasetOptions | None, Parameter(name="*")] = None,
    where: TargetOptions = HERE,
) -> None:
    """Build a dataset from text, dialogues or images: chunks, and a share held out."""
    sources = {"text": text, "chat": chat, "images": images}
    done = build(name, sources, options or DatasetOptions(), where)
    as_json(done) if where.json else tell_stored(done, where)


def build(
    name: str, sources: dict[str, list[Path] | None], options: DatasetOptions, where: TargetOptions
) -> DatasetShown:
    """Build a dataset from sources of one kind, and report its stages. Raises BadRequest,
    InvalidName, InvalidRunFile.
    """
    from coordinator.admin import datasets as commands
    from shared.decoding import convert

    more = _with_problems(options)
    kind, paths = _files(name, sources, more)
    _mark_taken(name, where)
    request: dict[str, object] = {
        "name": name,
        "kind": kind,
        "licence": more.licence,
        "source": more.source,
        "vocab_size": more.vocab_size,
        "column": more.column,
        "size": more.size,
        "channels": more.channels,
        "heldout_share": more.heldout_share,
        "seed": more.seed,
        **_for(more),
        **_told(paths, more),
    }
    if kind == "chat":
        request["template"] = _template(more.tokenizer)
    if where.remote:
        request["box"] = _sent(where, paths, more.tokenizer)
    else:
        request[kind] = tuple(map(str, paths))
        request["tokenizer"] = str(more.tokenizer.expanduser().absolute()) if more.tokenizer else ""
    with nullcontext() if where.json else _stages(where):
        return call(where, commands.add, convert(request, commands.AddDataset))


def _with_problems(options: DatasetOptions) -> DatasetOptions:
    """Return the options with problems as files for their workload."""
    if not options.problems:
        return options
    if options.files or options.workload:
        raise BadRequest("give one of --problems and --for WORKLOAD --files")
    return replace(options, workload="rollouts", files=options.problems)


def _mark_taken(name: str, where: Where) -> None:
    """Warn, before a dataset is built, that its name is taken: only equal content is accepted."""
    from coordinator.admin import datasets as commands

    # an error means that nothing is stored yet, or the next call reports it
    with contextlib.suppress(VolunteerError):
        if any(dataset.name == name for dataset in call(where, commands.listing, EmptyRequest())):
            print(
                f'There is a dataset called "{name}": this one is refused unless it comes out the '
                "same.",
                file=sys.stderr,
                flush=True,
            )


STAGES = {
    "reading": "Reading.",
    "tokenizer": "Learning a vocabulary.",
    "writing": "Storing.",
    "judge": "Training the judge of samples: up to two minutes.",
}


@contextmanager
def _stages(where: Where) -> Iterator[None]:
    """Report the stages of a build, each once, and its progress."""
    from coordinator.runs.datasets import progress

    with ProgressLine(sys.stdout) as line:
        if where.remote:
            line.say("The server builds the dataset.")
        stages = set[str]()

        def tell(now: TextBuild | ImageBuild) -> None:
            if now.stage not in stages:
                stages.add(now.stage)
                line.say(STAGES[now.stage])
            line.tell(now.done, now.total)

        token = progress.set(tell)
        try:
            yield
        finally:
            progress.reset(token)


def _files(
    name: str, sources: dict[str, list[Path] | None], more: DatasetOptions
) -> tuple[str, list[Path]]:
    """Return the kind of files and their paths. Raises BadRequest and InvalidName."""
    from coordinator.admin.datasets import NAME_FILES
    from coordinator.rules.run_file import NAME_RULE, fits_a_path

    sources = {
        **sources,
        "suite": [more.suite] if more.suite else None,
        "files": more.files,
    }
    named = {kind: paths for kind, paths in sources.items() if paths}
    if len(named) > 1:
        raise BadRequest(f"give one of {', '.join(f'--{kind}' for kind in named)}")
    paths = [existing_path(path) for group in named.values() for path in group]
    if more.tokenizer:
        existing_path(more.tokenizer)
    if len(named) != 1 or bool(more.files) != bool(more.workload):
        raise BadRequest(NAME_FILES)
    if not fits_a_path(name):  # the service checks this too, but only after the files were sent
        raise InvalidName(f"the name of a dataset must be {NAME_RULE}")
    return next(iter(named)), paths


def _for(more: DatasetOptions) -> dict[str, object]:
    """Return the options for a workload that builds the dataset itself. Raises BadRequest."""
    if not more.workload:
        if more.set:
            raise BadRequest("--set is for the workload that --for names")
        return {}
    wrong = [option for option in more.set or () if "=" not in option]
    if wrong:
        raise BadRequest(f"--set needs KEY=VALUE, not {wrong[0][:40]!r}")
    beside: dict[str, object] = {}
    if more.tokenizer is not None:
        # a tokenizer without a template serves for plain text
        with contextlib.suppress(InvalidRunFile):
            beside["template"] = _template(more.tokenizer)
    options = {key: value for key, _, value in (option.partition("=") for option in more.set or ())}
    return {"workload": more.workload, "options": options, **beside}


def _told(paths: list[Path], more: DatasetOptions) -> dict[str, str]:
    """Return the licence and source that the folders name, if the command does not name them."""
    from shared.workloads.data.table_rows import licence_and_source

    licence, source = licence_and_source(paths)
    return {"licence": more.licence or licence, "source": more.source or source}


def tell_stored(done: DatasetShown, where: Where) -> None:
    """Print the size of a stored dataset and the sources that were left out."""
    for sentence in done.skipped[:SKIPPED_SHOWN]:
        print(f"left out: {sentence}", file=sys.stderr)
    count = int(done.meta.get("skipped", 0))
    if count > SKIPPED_SHOWN:
        more = f"left out: {count - SKIPPED_SHOWN} more, named by `coordinator dataset list --json`"
        print(where.hint(more), file=sys.stderr)
    if "answered_by" in done.meta:
        print(
            f'The suite "{done.name}" is stored: {done.heldout:,} examples, of which guessing gets '
            f"{float(done.meta['chance']):.0%} right."
        )
        print(f'Next: suites = ["{done.name}"] under [evaluation] of a run file.')
        return
    left_out = f", {count:,} left out" if count else ""
    print(
        f'The dataset "{done.name}" is stored: {done.items:,} {done.kind} to train on, '
        f"{done.heldout:,} held out{left_out}."
    )
    if report := _report(done):
        print(f"{report}.")


def _report(done: DatasetShown) -> str:
    """Describe texts: how many there are, how long, and how many copies were dropped."""
    documents = int(done.meta.get("documents", 0))
    if not documents:
        return str(done.meta.get("found", ""))
    copies = int(done.meta.get("copies", 0))
    tokens = done.items + done.heldout
    parts = [
        *([str(done.meta["found"])] if "found" in done.meta else []),
        f"{counted(documents, 'document')} of {tokens / documents:,.0f} tokens each on average",
        f"{copies:,} exact {'copy' if copies == 1 else 'copies'} dropped",
    ]
    if unit := done.meta.get("length_unit"):
        middle, long = (int(done.meta[key]) for key in ("length_median", "length_95"))
        longest = int(done.meta["length_longest"])
        parts.append(
            f"half shorter than {middle:,} {unit}, 95 % than {long:,}, none over {longest:,}"
        )
    if "answer_share" in done.meta:
        parts.append(f"{float(done.meta['answer_share']):.1%} of the tokens are learnt")
    if per_token := float(done.meta.get("bytes_per_token", 0)):
        parts.append(f"{per_token:.2f} bytes a token")
    return ", ".join(parts)


def _template(tokenizer: Path | None) -> str:
    """Return the encoded chat template found next to a tokenizer. Raises BadRequest without a
    tokenizer, InvalidRunFile for an unreadable template.
    """
    import msgspec

    from shared.workloads.data.chat_template import NO_TOKENIZER, template_beside

    if tokenizer is None:
        raise BadRequest(NO_TOKENIZER)
    return msgspec.json.encode(template_beside(tokenizer.expanduser())).decode()


def _sent(where: Where, paths: list[Path], tokenizer: Path | None) -> str:
    """Send the files to the server; return the transfer box that holds them there."""
    from coordinator.admin.datasets import TOKENIZER_FILE
    from coordinator.admin.remote_server import flat_names
    from shared.workloads.data.skipped_files import Skipped
    from shared.workloads.data.table_rows import tables_in

    connection, box = where.connection(), secrets.token_hex(16)
    left_out = Skipped()
    tables = {path: tables_in(path, left_out) for path in paths if path.is_dir()}
    for sentence in left_out.sentences[:SKIPPED_SHOWN]:
        print(f"left out: {sentence}", file=sys.stderr)
    files = [file for path in paths for file in tables.get(path) or [path]]
    for name, path in flat_names(files):
        connection.put(box, name, path)
    if tokenizer:
        connection.put(box, TOKENIZER_FILE, tokenizer.expanduser())
    return box


@app.command(name="list")
def listing(*, where: TargetOptions = HERE) -> None:
    """Every dataset."""
    from coordinator.admin import datasets as commands

    listed(
        where,
        commands.listing,
        EmptyRequest(),
        {
            "name": lambda d: d.name,
            "kind": lambda d: d.kind,
            "items": lambda d: d.items,
            "held out": lambda d: d.heldout,
            "left out": lambda d: d.meta.get("skipped", 0),
            "size": lambda d: size(d.size),
            "licence": lambda d: d.licence,
            "source": lambda d: d.source,
        },
        "No dataset yet: `coordinator dataset add NAME --text PATH` (or --images PATH)",
    )


@app.command
def delete(
    name: Annotated[str, Parameter(help="Name of the dataset.")],
    *,
    yes: Yes = False,
    where: TargetOptions = HERE,
) -> int:
    """Delete a dataset that no run needs. Only a preview, without --yes."""
    from coordinator.admin import datasets as commands

    request = ConfirmedRequest(name=name, yes=yes)
    return deed(call(where, commands.delete, request), where.json)


def add_to(parent: App) -> None:
    parent.command(app)

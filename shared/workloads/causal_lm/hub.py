"""Model on a hub: `hub:OWNER/NAME@REVISION`, pinned to a commit when a run is created from it.

The list of files and the settings are checked before any weights are fetched. The library's own
client fetches files into its own cache, so HF_ENDPOINT, HF_TOKEN and HF_HOME apply; it is imported
only when a hub is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.errors import Configuration, InvalidRunFile, Unavailable, VolunteerError, why
from shared.files.deletions import delete_file
from shared.programs.installation import missing_extra_error
from shared.programs.machine_limits import disk_bytes
from shared.text import escaped, size
from shared.workloads.causal_lm import architectures, model_folder
from shared.workloads.causal_lm.base_settings import GENERATION, TOKENS
from shared.workloads.causal_lm.model_folder import INDEX, SETTINGS, TOKENIZER
from shared.workloads.data.tokenizer import FILE_BYTES_MAX

PREFIX = "hub:"
_REFERENCE = re.compile(
    r"hub:([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w][\w./-]{0,99}))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LICENCE = re.compile(r"[\w.+-]{1,64}", re.ASCII)
_MIRROR = "try again, or ask another mirror (HF_ENDPOINT)"
# Optional files besides the settings and the weights.
_BESIDE = (TOKENIZER, TOKENS, GENERATION, "chat_template.jinja")
_BESIDE_MAX = {TOKENIZER: FILE_BYTES_MAX}
_SMALL_MAX = 1 << 20
_LISTED_MAX = 10_000  # most files of a repository
# most bytes of a model's files beyond four for each parameter: headers, tables
_ROOM_BYTES = 64 << 20
# needed disk space, in sizes of the model: the library's cache, and the coordinator's copy
_SPACE = 2


class Reference(NamedTuple):
    """Repository of a model hub, at a revision."""

    repository: str
    revision: str

    @property
    def text(self) -> str:
        return f"{PREFIX}{self.repository}@{self.revision}"

    @property
    def pinned(self) -> bool:
        """Return True if the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None


class HubModel(msgspec.Struct, frozen=True, kw_only=True):
    """One commit of a repository: its licence, and the size and hash of each file."""

    reference: Reference
    licence: str
    sizes: Mapping[str, int]
    hashes: Mapping[str, str]  # SHA-256 of each file whose SHA-256 the hub states


def reference(source: str) -> Reference:
    """Parse `hub:OWNER/NAME@REVISION`. Raises InvalidRunFile for another form."""
    match = _REFERENCE.fullmatch(source)
    if match is None or ".." in source:
        raise InvalidRunFile(
            f"[model] from: {escaped(source, 120)!r} names no model of a hub: write"
            " hub:OWNER/NAME@REVISION"
        )
    return Reference(match[1], match[2] or "main")


def resolved(source: str) -> HubModel:
    """Ask the hub for a revision's commit and its files.

    Raises InvalidRunFile for a wrong or missing model, Unavailable for an unreachable hub.
    """
    target = reference(source)
    with _refusals(target) as api:
        info = api.model_info(target.repository, revision=target.revision, files_metadata=True)
    commit, files = str(info.sha), info.siblings or []
    if not _COMMIT.fullmatch(commit) or (target.pinned and commit != target.revision):
        raise InvalidRunFile(
            f"[model] from: the hub answers {target.text} with the commit {escaped(commit, 60)},"
            f" which is a different one: {_MIRROR}"
        )
    if len(files) > _LISTED_MAX:
        raise InvalidRunFile(f"{target.text} has more than {_LISTED_MAX:,} files")
    return HubModel(
        reference=Reference(target.repository, commit),
        licence=_licence(info),
        sizes={file.rfilename: int(file.size or 0) for file in files},
        hashes={file.rfilename: str(file.lfs["sha256"]) for file in files if file.lfs},
    )


def fetched(model: HubModel) -> Path:
    """Fetch a model into the library's cache; return the folder of its commit.

    Raises InvalidRunFile if the model cannot be trained here, before fetching its weights.
    """
    for name in _BESIDE:
        _check_size(model, name, _BESIDE_MAX.get(name, _SMALL_MAX))
    folder = _file(model, SETTINGS, model_folder.SETTINGS_MAX).parent
    shape = model_folder.shape_of(model_folder.settings_in(folder))
    names = _weights(model)
    total = sum(model.sizes[name] for name in names)
    most = 4 * architectures.count(shape) + 4 * _head(shape) + _ROOM_BYTES
    if total > most:
        raise InvalidRunFile(
            f"{model.reference.text} lists {size(total)} of weights, but its {SETTINGS} describes a"
            f" model of at most {size(most)}"
        )
    free = disk_bytes(folder)[0]
    if free < _SPACE * total:
        raise InvalidRunFile(
            f"{model.reference.text} has {size(total)} of weights, which need"
            f" {size(_SPACE * total)} on this disk; {size(free)} are free: make room, or move the"
            " library's cache with HF_HOME"
        )
    for name in (*(name for name in _BESIDE if name in model.sizes), *names):
        path = _file(model, name, model.sizes[name])
        listed = model.hashes.get(name)
        if listed and model_folder.hashed(path).sha256 != listed:
            delete_file(path.resolve(), "copy")  # or the library would accept it next time
            delete_file(path, "copy")
            raise InvalidRunFile(
                f"{name} of {model.reference.text} is not what the hub lists: its hash is wrong."
                " It was removed: try again"
            )
    return folder


def folder_of(source: str, names: Iterable[str]) -> Path:
    """Return the folder with these files of a pinned model, in the library's cache; removed files
    are fetched again.
    """
    target = reference(source)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise _missing() from error
    there = [
        try_to_load_from_cache(target.repository, name, revision=target.revision)
        for name in (SETTINGS, *names)
    ]
    if all(isinstance(path, str) for path in there):
        return Path(str(there[0])).parent
    return fetched(resolved(source))


def path_on_hub(source: str, name: str) -> str:
    """Return the path of a pinned model's file below the address of a hub."""
    target = reference(source)
    return f"{target.repository}/resolve/{target.revision}/{name}"


def _weights(model: HubModel) -> list[str]:
    """Return the names of the weights' files. Raises InvalidRunFile for a refused format, or for an
    index that names a file which the repository does not have.
    """
    whole = "model.safetensors"
    if INDEX in model.sizes:
        folder = _file(model, INDEX, model_folder.INDEX_MAX).parent
        names = model_folder.indexed(folder)
    elif whole in model.sizes:
        names = [whole]
    else:
        raise InvalidRunFile(
            f"{model.reference.text} has no weights in safetensors ({whole}): pickles can run code"
            " and are never fetched; take a revision or a copy that has them"
        )
    for name in names:
        if not model.sizes.get(name):
            raise InvalidRunFile(
                f"{INDEX} names {name}, which {model.reference.text} does not have: take a revision"
                " that is whole"
            )
    return names


def _file(model: HubModel, name: str, bytes_max: int) -> Path:
    """Fetch one file of a commit. Raises InvalidRunFile for a file that is not listed, or whose
    size is not the listed size.
    """
    from huggingface_hub import hf_hub_download

    if name not in model.sizes:
        raise InvalidRunFile(
            f"{model.reference.text} has no {name}: take a model of the library transformers"
        )
    _check_size(model, name, bytes_max)
    repository, commit = model.reference

    def fetch(**more: Any) -> Any:
        return hf_hub_download(repository, name, revision=commit, endpoint=_endpoint(), **more)

    with _refusals(model.reference):
        remote = fetch(dry_run=True)
        if remote.commit_hash != commit or remote.file_size != model.sizes[name]:
            raise InvalidRunFile(
                f"{name} of {model.reference.text} has {remote.file_size} bytes at commit"
                f" {remote.commit_hash}, but {model.sizes[name]} were listed: the hub, or a mirror"
                f" of it, does not serve what it lists: {_MIRROR}"
            )
        return Path(fetch())


def _check_size(model: HubModel, name: str, bytes_max: int) -> None:
    listed = model.sizes.get(name, 0)
    if listed > bytes_max:
        raise InvalidRunFile(
            f"{name} of {model.reference.text} has {size(listed)}: more than {size(bytes_max)} are"
            " not read"
        )


def _head(shape: architectures.Shape) -> int:
    """Return the number of parameters of a head; files may contain a head although it is tied."""
    name, (rows, *columns) = next(shape.shapes())
    del name
    return rows * columns[0]


def _licence(info: Any) -> str:
    """Return the licence on a model's card; "" if the card states none."""
    card = info.card_data
    licence = (card.get("license") if card else None) or next(
        (tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")), ""
    )
    return str(licence) if _LICENCE.fullmatch(str(licence)) else ""


def _endpoint() -> str | None:
    """Return the address of the hub that the environment names now, which the library reads only at
    import; None for the library's default.
    """
    return os.environ.get("HF_ENDPOINT") or None


def _missing() -> Configuration:
    return missing_extra_error("a model of a hub", "hf")


@contextmanager
def _refusals(target: Reference) -> Iterator[Any]:
    """Convert a hub's errors to InvalidRunFile if the run file is at fault, else to Unavailable."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub import errors as theirs
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise _missing() from error
    disable_progress_bars()
    try:
        yield HfApi(endpoint=_endpoint(), library_name="volunteer")
    except VolunteerError:
        raise
    except Exception as error:
        match error:
            case theirs.GatedRepoError():  # before its base class RepositoryNotFoundError
                sentence = f"{target.text} is gated: accept its terms there, then set HF_TOKEN"
            case theirs.RevisionNotFoundError():
                sentence = f"{target.repository} has no revision {target.revision}"
            case theirs.RepositoryNotFoundError():
                sentence = (
                    f"the hub has no model {target.repository}, or shows it to nobody without a"
                )
                sentence += " token (HF_TOKEN)"
            case theirs.RemoteEntryNotFoundError():
                sentence = (
                    f"a file that {target.text} lists is not there ({_first(error)}): {_MIRROR}"
                )
            case _:
                sentence = ""
        if sentence:
            raise InvalidRunFile(f"[model] from: {sentence}") from None
        raise Unavailable(f"{target.text} cannot be fetched: {_first(error)}") from None


def _first(error: Exception) -> str:
    """Return an error's first line, without the token, which a mirror may repeat."""
    from huggingface_hub import get_token

    token = get_token()
    message = why(error).replace(token, "***") if token else why(error)
    return escaped(message.strip().partition("\n")[0], 200)

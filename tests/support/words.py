"""Bring the translations up to date with the code: `make words`.

Messages that are new come without a translation, those that are gone leave, and what is translated
stays. Says of each language how many are missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "volunteer"
LANGUAGES = PROGRAM / "i18n"
# Modules of both sides whose sentences a volunteer reads on a screen.
SHARED = [
    ROOT / "shared" / f"{name}.py"
    for name in (
        "errors",
        "network/links",
        "proofs/signing",
        "protocol/protocol_version",
        "nearest_name",
        "settings",
        "decoding",
        "files/disk_writes",
        "files/file_lock",
        "files/new_folder",
        "files/source_paths",
        "files/toml_text",
        "programs/silence_watch",
        "programs/usage_errors",
        "workloads/base",
        "workloads/declaration",
        "workloads/model_files",
    )
]
# Functions of the catalogue: the places of the context, of the message and of its plural.
KEYWORDS: dict[str, tuple[int | None, int, int | None]] = {
    "_": (None, 0, None),
    "N_": (None, 0, None),
    "ngettext": (None, 0, 1),
    "pgettext": (0, 1, None),
    "NP_": (0, 1, None),
    "Sentence": (None, 0, None),
    "plural": (None, 0, 1),
}
COLUMNS = 100


def messages(tree: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield line, context and message (with its plural) of every call of the catalogue, including
    the ones inside of f-strings, which Babel's own reader misses.
    """
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in KEYWORDS:
            continue
        places = KEYWORDS[node.func.id]
        found = ["" if place is None else _text(node, place) for place in places]
        context, one, many = found
        if one:
            yield node.lineno, context, (one, many) if many else (one,)


def _text(call: ast.Call, place: int) -> str:
    """Return an argument that is written as a text; a variable is none."""
    at = call.args[place] if place < len(call.args) else None
    return at.value if isinstance(at, ast.Constant) and isinstance(at.value, str) else ""


def extracted() -> Catalog:
    """Return every message of the program's code."""
    found = Catalog(project="volunteer", charset="utf-8")
    for file in sorted((*PROGRAM.rglob("*.py"), *SHARED)):
        place = str(file.relative_to(ROOT))
        read = sorted(messages(ast.parse(file.read_text(encoding="utf-8"))))
        for line, context, texts in read:
            found.add(
                texts if len(texts) > 1 else texts[0],
                locations=[(place, line)],
                context=context or None,
            )
    return found


def written(catalogue: Catalog) -> bytes:
    """Return a catalogue as a file, the messages of one module together."""
    out = BytesIO()
    write_po(
        out,
        catalogue,
        width=COLUMNS,
        ignore_obsolete=True,
        sort_by_file=True,
        include_lineno=False,
    )
    return out.getvalue()


def updated(file: Path, template: Catalog) -> Catalog:
    """Return the translations of a file, brought up to date."""
    with file.open("rb") as source:
        known = read_po(source, locale=file.stem)
    known.update(
        template,
        no_fuzzy_matching=True,
        update_header_comment=False,
        update_creation_date=False,
    )
    return known


def begun(language: str) -> Catalog:
    """Return the catalogue of a language that has no translation yet."""
    catalogue = Catalog(
        locale=language,
        project="volunteer",
        version="1",
        charset="utf-8",
        last_translator="The volunteer project",
        language_team=language,
        msgid_bugs_address="docs/translating.md",
        fuzzy=False,
    )
    catalogue.header_comment = f"# {language}: its glossary."
    return catalogue


def main(languages: list[str]) -> None:
    """Update every translation, and begin the named ones."""
    template = extracted()
    for language in languages:
        file = LANGUAGES / f"{language}.po"
        if not file.exists():
            file.write_bytes(written(begun(language)))
    for file in sorted(LANGUAGES.glob("*.po")):
        known = updated(file, template)
        file.write_bytes(written(known))
        all_of_it = [message for message in known if message.id]
        missing = sum(1 for m in all_of_it if not m.string or not all(m.string))
        print(f"{file.relative_to(ROOT)}: {len(all_of_it)} messages, {missing} not translated")


if __name__ == "__main__":
    main(sys.argv[1:])

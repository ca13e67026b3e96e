"""Sentences about mistakes in a command line, of both programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from itertools import chain as chained
from pathlib import Path
from typing import Literal, get_args, get_origin

from cyclopts import (
    App,
    Argument,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from shared.nearest import hint, nearest
from shared.sentences import Sentence, of

# Commands that a person types to one program and the other has.
OF_THE_OTHER = {
    "coordinator": ("join", "link", "chat", "generate", "play", "benchmark", "pause", "resume"),
    "volunteer": ("serve", "demo", "dataset", "invite", "try", "backup", "grant"),
}
# Commands that a person expects, and what does the same.
INSTEAD = {
    ("volunteer", "start"): "volunteer",
    ("volunteer", "run"): "volunteer --run NAME",
    ("volunteer", "train"): "volunteer --run NAME",
}
KINDS: dict[object, Sentence] = {
    int: Sentence("a whole number"),
    float: Sentence("a number"),
    bool: Sentence("yes or no"),
    datetime: Sentence("a time such as 2026-12-24T18:00"),
}


def mistake(program: str, error: CycloptsError, argv: Sequence[str], app: App) -> Sentence:
    """Return the mistake and the nearest valid word; other parser errors are quoted."""
    match error:
        case UnknownCommandError(app=within) if within is not None and error.unused_tokens:
            return no_command(program, error.unused_tokens[0], within, argv)
        case UnusedCliTokensError() if error.command_chain and error.unused_tokens:
            sentence = _unplaced(error.unused_tokens[0], error.command_chain, app)
        case UnusedCliTokensError():
            return no_command(program, (error.unused_tokens or [*argv])[0], app, argv)
        case UnknownOptionError():
            option = error.token.keyword or error.token.value
            if near := _near(option, error):
                return Sentence(
                    "there is no option {option}: did you mean {name}?", option=option, name=near
                )
            sentence = Sentence("there is no option {option} here", option=option)
        case CoercionError(token=token) if token is not None and error.msg is None:
            sentence = _no_value(error, token.value, token.keyword or _place(error))
        case MissingArgumentError():
            sentence = (
                Sentence("{name} needs a value", name=error.keyword)
                if error.keyword
                else Sentence("{name} is missing", name=_place(error))
            )
        case RepeatArgumentError():
            sentence = _repeated(error, argv, app)
        case _other:
            sentence = of(str(error).rstrip("."))
    command = " ".join((program, *(error.command_chain or ())))
    return Sentence("{said}; see `{command} --help`", said=sentence, command=command)


def _repeated(error: RepeatArgumentError, argv: Sequence[str], app: App) -> Sentence:
    """Return the mistake of an option that is there twice, or with its opposite."""
    option = error.token.keyword
    for argument in _arguments(error.command_chain or (), app):
        names = dict.fromkeys((*argument.names, *argument.negatives))
        typed = [name for name in names if name in argv]
        if option in typed and len(typed) > 1:
            return Sentence("give one of {names}", names=", ".join(typed))
    return Sentence("{name} was given twice", name=option)


def _arguments(chain: Sequence[str], app: App) -> list[Argument]:
    """Return the arguments of a command of the program."""
    for name in chain:
        app = app[name]
    return list(app.assemble_argument_collection())


def _unplaced(word: str, chain: Sequence[str], app: App) -> Sentence:
    """Return the mistake of a word without an option, with the command's options that take it."""
    accepted = _arguments(chain, app)
    arguments = [argument for argument in accepted if argument.index is None]
    if f"--{word}" in chained.from_iterable(argument.names for argument in arguments):
        return Sentence('"{word}" is one word too many: did you mean --{word}?', word=word)
    options = [argument.name for argument in arguments if _takes(argument.hint, word)]
    if not options:
        places = [_word_of(argument) for argument in accepted if argument.index is not None]
        return Sentence(
            '"{word}" is one word too many: only {names} may stand here',
            word=word,
            names=", ".join(places) or Sentence("options"),
        )
    return Sentence(
        '"{word}" needs an option before it: {names}', word=word, names=", ".join(options)
    )


def _takes(kind: object, word: str) -> bool:
    """Return True if an option of this type is for such a word: a number, a choice, a file."""
    kinds = (kind, *get_args(kind))
    choices = chained.from_iterable(get_args(one) for one in kinds if get_origin(one) is Literal)
    return word in choices or (int if word.isdecimal() else list[Path]) in kinds


def no_command(program: str, word: str, app: App, argv: Sequence[str]) -> Sentence:
    """Return the mistake of a word where a command of `app` is expected."""
    behind = argv[argv.index(word) + 1 :] if word in argv else ()
    rest = "".join(f" {shlex.quote(one)}" for one in behind)
    names = sorted(name for name in app if not name.startswith("-"))
    if word.startswith("-") and word in argv:
        before, at = [*argv[: argv.index(word)]], [one in names for one in behind]
        if True not in at:
            return Sentence("there is no option {option} here", option=word)
        options = (word, *behind[: at.index(True)])
        whole = shlex.join((program, *before, *behind[at.index(True) :], *options))
        return Sentence("{option} comes after the command: `{command}`", option=word, command=whole)
    if word in names:  # the word follows an option of the program itself
        return Sentence(
            '"{command}" comes first, and its options after it: `{program} {command} --help`',
            command=word,
            program=program,
        )
    if (program, word) in INSTEAD:
        return Sentence(
            'there is no command "{name}": `{command}` does it',
            name=word,
            command=INSTEAD[program, word],
        )
    if subjects := [name for name in names if word in app[name]]:
        commands = ", ".join(f"`{program} {name} {word}{rest}`" for name in subjects)
        return Sentence(
            'there is no command "{name}": did you mean {commands}?', name=word, commands=commands
        )
    if verb := next((one for one in behind if one in names and argv.index(word)), ""):
        arguments = [one for one in behind if one != verb]
        whole = shlex.join((program, *argv[: argv.index(word)], verb, word, *arguments))
        return Sentence(
            'there is no command "{name}": did you mean {commands}?',
            name=word,
            commands=f"`{whole}`",
        )
    if word in OF_THE_OTHER[program]:
        (other,) = OF_THE_OTHER.keys() - {program}
        return Sentence(
            'there is no command "{name}" here: did you mean `{other} {name}`?',
            name=word,
            other=other,
        )
    return Sentence('there is no command "{name}": {hint}', name=word, hint=hint(word, names))


def _near(option: str, error: UnknownOptionError) -> str:
    """Return the nearest option, if one is near; for a letter every option that begins with it."""
    names = chained.from_iterable(
        argument.names for argument in error.argument_collection if argument.parse
    )
    if len(option) == 2:
        return ", ".join(sorted(name for name in names if name.startswith(f"-{option}")))
    return nearest(option, names)


def _no_value(error: CoercionError, value: str, name: str) -> Sentence:
    kind = error.target_type
    if get_origin(kind) is Literal:
        expectation = Sentence("one of {names}", names=", ".join(map(str, get_args(kind))))
    else:
        expectation = KINDS.get(kind) or of(str(kind))
    return Sentence('{name}: "{value}" is not {what}', name=name, value=value, what=expectation)


def _place(error: CycloptsError) -> str:
    """Return the name of an argument as the help writes it: RUN by its place, or its option."""
    if error.argument is None:
        return ""
    return error.argument.name if error.argument.index is None else _word_of(error.argument)


def _word_of(argument: Argument) -> str:
    """Return the word of a place in the help, such as RUN."""
    return argument.name.lstrip("-").upper()

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

from shared.nearest_name import hint, nearest
from shared.sentences import Sentence, sentence_of

# Commands of the other program that a person may type to this one.
OF_THE_OTHER = {
    "coordinator": ("join", "link", "chat", "generate", "play", "benchmark", "pause", "resume"),
    "volunteer": ("serve", "demo", "dataset", "invite", "try", "backup", "grant"),
}
# Commands that a person expects in a program -> the command that does the same.
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
    """Return the sentence about a parser's error, with the nearest valid word; an error of another
    type is quoted.
    """
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
            sentence = sentence_of(str(error).rstrip("."))
    command = " ".join((program, *(error.command_chain or ())))
    return Sentence("{said}; see `{command} --help`", said=sentence, command=command)


def _repeated(error: RepeatArgumentError, argv: Sequence[str], app: App) -> Sentence:
    """Return the sentence about an option that is given twice, or together with its opposite."""
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
    """Return the sentence about a word that no parameter of the command takes, with the options
    that take such a word.
    """
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
    """Return True if an option of this type takes such a word: a number, a choice or a file."""
    kinds = (kind, *get_args(kind))
    literals = (member for member in kinds if get_origin(member) is Literal)
    choices = chained.from_iterable(get_args(literal) for literal in literals)
    return word in choices or (int if word.isdecimal() else list[Path]) in kinds


def no_command(program: str, word: str, app: App, argv: Sequence[str]) -> Sentence:
    """Return the sentence about a word that stands where a command of `app` is expected."""
    behind = argv[argv.index(word) + 1 :] if word in argv else ()
    arguments_typed = "".join(f" {shlex.quote(argument)}" for argument in behind)
    names = sorted(name for name in app if not name.startswith("-"))
    if word.startswith("-") and word in argv:
        before, at = [*argv[: argv.index(word)]], [argument in names for argument in behind]
        if True not in at:
            return Sentence("there is no option {option} here", option=word)
        options = (word, *behind[: at.index(True)])
        whole = shlex.join((program, *before, *behind[at.index(True) :], *options))
        return Sentence("{option} comes after the command: `{command}`", option=word, command=whole)
    if word in names:  # a command follows an option of the program itself
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
        commands = ", ".join(f"`{program} {name} {word}{arguments_typed}`" for name in subjects)
        return Sentence(
            'there is no command "{name}": did you mean {commands}?', name=word, commands=commands
        )
    verbs = [argument for argument in behind if argument in names and argv.index(word)]
    if verb := next(iter(verbs), ""):
        arguments = [argument for argument in behind if argument != verb]
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
    """Return the nearest option, "" if none is near; for a letter all options that begin so."""
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
        expectation = KINDS.get(kind) or sentence_of(str(kind))
    return Sentence('{name}: "{value}" is not {what}', name=name, value=value, what=expectation)


def _place(error: CycloptsError) -> str:
    """Return the name of an error's argument as the help writes it: a word such as RUN, or an
    option; "" for an error without an argument.
    """
    if error.argument is None:
        return ""
    return error.argument.name if error.argument.index is None else _word_of(error.argument)


def _word_of(argument: Argument) -> str:
    """Return the word of a positional argument in the help, such as RUN."""
    return argument.name.lstrip("-").upper()

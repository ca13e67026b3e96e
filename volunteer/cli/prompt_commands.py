"""key, usage, generate, chat and give: commands that spend a volunteer's credits."""

from __future__ import annotations

import asyncio
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter
from cyclopts.validators import Number

from shared.errors import BadRequest, Conflict, Forbidden, NotFound
from shared.files.text_file import UTF8
from shared.programs.silence_watch import pause_watch
from shared.sentences import Sentence, figure
from shared.text import printable
from shared.units import DAY_S, MIB
from volunteer.cli.drawings import draw, output_picture, picture_of
from volunteer.cli.exit_codes import at_terminal, remark, with_profile
from volunteer.cli.json_output import print_json, print_table
from volunteer.cli.options import Json, Profile
from volunteer.i18n.catalogue import N_, _, number, translated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from msgspec import Struct

    from shared.protocol.endpoint import Endpoint
    from shared.protocol.inference import (
        ImageReply,
        KeyInfo,
        ModelCard,
        Usage,
        UsageRow,
    )
    from volunteer.net.api import Api

T = TypeVar("T")

PROMPT_BYTES_MAX = MIB
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

STRANGERS = N_("volunteers' machines may answer and read this; --private keeps it off them")

Model = Annotated[
    str, Parameter(name="--run", help="A run, or one of its versions: RUN, RUN@best, RUN@40.")
]
MaxTokens = Annotated[
    int | None,
    Parameter(
        help="Most tokens of the answer (default: what the coordinator allows).",
        validator=Number(gte=1),
    ),
]
Temperature = Annotated[float, Parameter(help="0 takes the likeliest token; up to 2.")]
Private = Annotated[
    bool,
    Parameter(
        help="Ask the organiser's machines only, so that no volunteer can read the prompt.",
        negative="",
    ),
]
Seed = Annotated[int | None, Parameter(help="The same seed gives the same answer.")]

key = App(name="key", help="Keys for programs that speak OpenAI's interface.")


@key.command
def create(
    name: Annotated[str, Parameter(help="A label to tell keys apart.")] = "",
    *,
    cap: Annotated[float | None, Parameter(help="Most credits the key may ever spend.")] = None,
    days: Annotated[
        float | None,
        Parameter(help="Valid this long (default: always).", validator=Number(gt=0, lte=36_500)),
    ] = None,
    run: Annotated[
        tuple[str, ...], Parameter(help="A run the key may ask; may be repeated.", negative="")
    ] = (),
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Make a key. It is shown once: the coordinator keeps its hash and its first characters."""
    import time

    from shared.protocol.endpoints import KEY_CREATE
    from shared.protocol.inference import KeyRequest
    from shared.text import MICRO
    from volunteer.cli.start import identity_of
    from volunteer.settings.settings import directories

    request = KeyRequest(
        name=name,
        cap_micro=None if cap is None else _micro(cap, MICRO),
        expires_at=None if days is None else time.time() + days * DAY_S,
        runs=run,
    )

    # not retried, because a retry could make a second key
    key = call_account(profile, KEY_CREATE, body=request, patience_s=0)
    if json:
        return print_json(key)
    print(printable(key.key))
    address = f"{identity_of(directories(profile=profile)).url}/v1"
    remark(_("keep this key: it is not shown again; programs ask {address}", address=address))
    return 0


@key.command(name="list")
def key_list(*, json: Json = False, profile: Profile = "") -> int:
    """Every key of your account, without its secret."""
    from shared.protocol.endpoints import KEYS

    keys = call_account(profile, KEYS)
    if json:
        return print_json(keys)
    if not keys:
        print(with_profile(_("no key yet: `volunteer key create`"), profile))
        return 0
    names = [_("number"), _("key"), _("state"), _("credits spent"), _("name"), _("only for")]
    print_table(names, [_key_cells(key) for key in keys], {0})
    return 0


@key.command
def revoke(
    id: Annotated[int, Parameter(help="Number of the key, as `volunteer key list` shows it.")],
    *,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Revoke a key: its next request is refused."""
    from shared.protocol.endpoints import KEY_REVOKE
    from volunteer.text import key_state

    done = call_account(profile, KEY_REVOKE, {"key": id})
    if json:
        return print_json(done)
    print(_("key {id} is {state}", id=done.id, state=key_state(done.state)))
    return 0


def usage(
    *,
    key: Annotated[int, Parameter(help="Only requests with this key, by its number.")] = 0,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Your newest 500 requests: model, tokens, credits, time. No prompt is kept."""
    from shared.protocol.endpoints import USAGE

    rows = call_account(profile, USAGE, {"key": key})
    if json:
        return print_json(rows)
    if not rows:
        print(with_profile(_("nothing was asked yet: `volunteer generate RUN PROMPT`"), profile))
        return 0
    names = [_("at"), _("run"), _("in"), _("out"), _("credits"), _("seconds"), _("key")]
    print_table(names, [_usage_cells(row) for row in rows], {2, 3, 4, 5})
    return 0


def runs(*, json: Json = False, profile: Profile = "") -> int:
    """List the runs of the coordinator, to help, ask or play against."""
    from shared.protocol.endpoints import RUNS

    infos = call_account(profile, RUNS)
    if json:
        return print_json(infos)
    if not infos:
        print(_("no run yet"))
        return 0
    print_table(
        [_("run"), _("state"), _("workload"), _("version"), _("loss"), _("workers")],
        [
            [
                info.name,
                _(info.state),
                info.workload,
                str(info.version) if info.version >= 0 else "-",
                "-" if info.loss is None else number(info.loss, ".4f"),
                number(info.workers, ","),
            ]
            for info in infos
        ],
        {3, 4, 5},
    )
    return 0


def generate(
    model: Model,
    prompt: Annotated[str, Parameter(help="Text to continue; - reads standard input.")] = "-",
    *,
    stream: Annotated[bool, Parameter(help="Print the words as they come.", negative="")] = False,
    json: Json = False,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    private: Private = False,
    output: Annotated[
        Path | None, Parameter(name=("--output", "-o"), help="PNG file to write, for an image run.")
    ] = None,
    profile: Profile = "",
) -> int:
    """Let the model continue a text, or an image run draw; the price is printed at the end."""
    if json and output is not None:
        raise BadRequest(Sentence("--json prints the picture itself: leave --output out"))
    from shared.protocol.endpoints import MODEL
    from shared.protocol.inference import ImageReply

    sampling = {"seed": seed, "max_tokens": max_tokens}
    body = {"model": model, "temperature": temperature}
    body |= {name: value for name, value in sampling.items() if value is not None}
    body |= {"answered_by": "organiser"} if private else {}

    async def ask(api: Api) -> tuple[str, Usage | None] | ImageReply:
        card = await api.query(MODEL, model=model)
        if card.output == "image":
            return await draw(api, model, seed)
        if output is not None:
            raise BadRequest(
                Sentence(
                    "{model} writes text: leave --output out, it is for image runs", model=model
                )
            )
        _warn_of_strangers(card, private=private)
        text = await asyncio.to_thread(_standard_input) if prompt == "-" else prompt
        payload = {**body, "prompt": text}
        return await _stream_answer(api, COMPLETIONS, payload, show=stream and not json)

    reply = ask_account(profile, ask)
    if isinstance(reply, ImageReply):
        return _output_drawing(reply, model, output, json=json)
    completion, used = reply
    if json:
        return print_json({"model": model, "text": completion, "usage": used})
    print("" if stream else _safe(completion))
    print(_price(used), file=sys.stderr)
    return 0


def _output_drawing(reply: ImageReply, model: str, output: Path | None, *, json: bool) -> int:
    """Show the picture of an image run and its price."""
    from volunteer.i18n.formats import credit

    png = picture_of(reply)
    if json:
        return print_json({"model": model, "images": [png], "usage": reply.usage})
    output_picture(png, output)
    price = credit(reply.usage.cost_micro, 6)
    print(_("1 picture: {credits} credits", credits=price), file=sys.stderr)
    return 0


def chat(
    model: Model,
    *,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 1.0,
    private: Private = False,
    profile: Profile = "",
) -> int:
    """Talk with the model, one line at a time; an empty line ends it. Nothing is kept."""
    from shared.protocol.endpoints import MODEL
    from volunteer.net.reply_errors import PromptTooLong

    sampling = {"seed": seed, "max_tokens": max_tokens}
    options = {"model": model, "temperature": temperature}
    options |= {name: value for name, value in sampling.items() if value is not None}
    options |= {"answered_by": "organiser"} if private else {}

    async def talk(api: Api) -> int:
        card = await api.query(MODEL, model=model)
        if at_terminal():
            remark(_price_of(card))
        _warn_of_strangers(card, private=private)
        turns: list[dict[str, str]] = []
        while words := await asyncio.to_thread(_line):
            turns.append({"role": "user", "content": words})
            try:
                reply, used = await _chat_answer(api, options, turns)
            except PromptTooLong as error:
                if not at_terminal():
                    raise
                remark(translated(error.message))
                continue
            turns.append({"role": "assistant", "content": reply})
            print()
            print(_price(used), file=sys.stderr)
        return 0

    return int(ask_account(profile, talk))


def give(
    name: Annotated[str, Parameter(help="Nickname or id of the receiver.")],
    amount: Annotated[float, Parameter(help="Credits.")],
    *,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Give earned credits to another volunteer."""
    from shared.protocol.endpoints import GIVE
    from shared.text import MICRO
    from volunteer.account.profile_directory import Profile as ProfileDirectory
    from volunteer.cli.start import identity_of
    from volunteer.i18n.formats import credit, exact_credit
    from volunteer.settings.settings import directories

    amount_micro, places = _micro(amount, MICRO), directories(profile=profile)
    home = ProfileDirectory(places.profile).home(identity_of(places))
    request, repeated = home.gift(name, amount_micro)
    if repeated:
        remark(_("the same gift got no answer before: it is sent again, and paid only once"))
    try:
        done = call_account(profile, GIVE, body=request)
    except (BadRequest, Forbidden, NotFound, Conflict):
        home.forget_gift(request)  # the coordinator refused it
        raise
    home.forget_gift(request)
    if json:
        return print_json(done)
    sentence = _(
        "{to} got {amount} credits; you have {left}",
        to=done.to,
        amount=exact_credit(done.amount_micro),
        left=credit(done.left_micro),
    )
    print(printable(sentence))
    return 0


def add_to(parent: App) -> None:
    parent.command(key)
    for command in (runs, usage, generate, chat, give):
        parent.command(command)


def ask_account(profile: str, question: Callable[[Api], Awaitable[Any]]) -> Any:
    """Return the coordinator's answer to a question with this profile's account."""
    from volunteer.cli.start import ask_coordinator
    from volunteer.settings.settings import directories

    return asyncio.run(ask_coordinator(directories(profile=profile), question))


def call_account(
    profile: str,
    endpoint: Endpoint[T],
    args: Mapping[str, str | int] | None = None,
    body: Struct | None = None,
    patience_s: float | None = None,
) -> T:
    """Return the reply of one endpoint to this profile's account."""
    from volunteer.net.api import ASK_S

    patience_s = ASK_S if patience_s is None else patience_s
    answer: T = ask_account(
        profile, lambda api: api.call(endpoint, args, body, patience_s=patience_s)
    )
    return answer


def _warn_of_strangers(card: ModelCard, *, private: bool) -> None:
    """Print a remark if volunteers' machines may answer."""
    if card.answered_by == "volunteers" and not private:
        remark(_(STRANGERS))


async def _chat_answer(
    api: Api, options: Mapping[str, object], turns: list[dict[str, str]]
) -> tuple[str, Usage | None]:
    """Return the answer to the last turn, printed as it arrives, and its usage. While the turns do
    not fit the model's window, the older half of them is removed; a last turn that does not fit
    alone is removed too. Raises PromptTooLong.
    """
    from volunteer.net.reply_errors import PromptTooLong

    while True:
        try:
            return await _stream_answer(api, CHAT, {**options, "messages": turns}, show=True)
        except PromptTooLong:
            pairs = (len(turns) // 2 + 1) // 2  # questions with their answers
            del turns[: max(2, 2 * pairs)]
            if not turns:
                raise
            remark(_("the beginning of the talk no longer fits the model, and is left out"))


async def _stream_answer(
    api: Api, path: str, body: dict[str, Any], *, show: bool
) -> tuple[str, Usage | None]:
    """Return an answer and its usage, None if the coordinator sent no usage; with `show` the words
    are printed as they arrive.
    """
    from volunteer.net.prompt_api import stream_answer

    parts: list[str] = []
    used = None
    async for chunk in stream_answer(api.client, path, body):
        used = chunk.usage or used
        for choice in chunk.choices:
            parts.append(choice.words)
            if show:
                print(_safe(choice.words), end="", flush=True)
    return "".join(parts), used


def _line() -> str:
    """Return the next line of standard input, typed or from a file; "" at its end."""
    try:
        with pause_watch():
            return input("> " if at_terminal() else "").strip()
    except EOFError:
        return ""


def _standard_input() -> str:
    if sys.stdin.isatty():
        remark(_("the text to continue; Ctrl-D on an empty line ends it"))
    with pause_watch():
        data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
    if len(data) > PROMPT_BYTES_MAX:
        most = figure(f"{PROMPT_BYTES_MAX:,}")
        raise BadRequest(
            Sentence("the prompt is too long: at most {most} bytes are sent", most=most)
        )
    try:
        return data.decode(UTF8)
    except UnicodeDecodeError:
        raise BadRequest(Sentence("the prompt on standard input is not UTF-8 text")) from None


def _safe(text: str) -> str:
    """Return a model's words without control characters, which could move the terminal's cursor."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c)[0] != "C")


def _price_of(card: ModelCard) -> str:
    from volunteer.i18n.formats import credit

    return _(
        "{model}: {credits} credits for a thousand tokens; an empty line ends it",
        model=card.id,
        credits=credit(card.price_micro, 6),
    )


def _price(used: Usage | None) -> str:
    from volunteer.i18n.formats import credit

    if used is None:
        return ""
    return _(
        "{tokens_in} tokens in, {tokens_out} out: {credits} credits",
        tokens_in=number(used.prompt_tokens, ","),
        tokens_out=number(used.completion_tokens, ","),
        credits=credit(used.cost_micro, 6),
    )


def _key_cells(key: KeyInfo) -> list[str]:
    from volunteer.i18n.formats import credit
    from volunteer.text import key_state

    spent = credit(key.spent_micro)
    if key.cap_micro is not None:
        spent = _("{spent} of {cap}", spent=spent, cap=credit(key.cap_micro))
    state, only = key_state(key.state), ", ".join(key.runs)
    return [str(key.id), f"{key.prefix}...", state, spent, key.name, only]


def _usage_cells(row: UsageRow) -> list[str]:
    from volunteer.account.record_check import day
    from volunteer.i18n.formats import credit

    output = number(row.tokens_out, ",")
    return [
        _(day(row.at)),
        row.model,
        number(row.tokens_in, ","),
        _("{made} images", made=output) if row.kind == "image" else output,
        _("free") if row.free else credit(row.cost_micro, 6),
        _("under way") if row.latency_s is None else number(row.latency_s, ".1f"),
        row.key or _("this account"),
    ]


def _micro(credits: float, micro: int) -> int:
    """Return credits in micro-credits. Raises BadRequest for an invalid amount."""
    if not 0 < credits <= 1e9 or not (amount_micro := round(credits * micro)):
        raise BadRequest(
            Sentence(
                "an amount is more than 0 and at most {most} credits", most=figure("1,000,000,000")
            )
        )
    return amount_micro

"""Command line of the volunteer.

This module only parses; a command imports its modules when it runs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from shared.errors import BadRequest, VolunteerError
from shared.programs.help_groups import add_help, group
from shared.programs.silence_watch import watch_silence
from shared.sentences import Sentence
from volunteer.cli import exit_codes, manage, prompt_commands
from volunteer.cli.exit_codes import EXIT_USAGE, print_error, with_profile
from volunteer.cli.export_command import export
from volunteer.cli.json_output import print_json, print_table
from volunteer.cli.options import Json, Profile
from volunteer.cli.workload_commands import workload
from volunteer.i18n.catalogue import _, translated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from volunteer.control.control import Control
    from volunteer.control.status import Status
    from volunteer.settings.settings import Directories

T = TypeVar("T")

RUNS_NAMED = 3  # runs over members' data that `join` names

Device = Annotated[str, Parameter(help='One device such as "cuda:0"; empty = all.')]


def _version() -> str:
    from volunteer.account.join import software

    return software()


app = App(
    name="volunteer",
    help="Lend your GPU or CPU: volunteers train one model together. Without a command "
    "it opens the screen.",
    version=_version,
    help_format="plaintext",
)


@app.default
def start(
    *,
    no_ui: Annotated[
        bool, Parameter(help="Work without the screen: one line per event.", negative="")
    ] = False,
    json: Annotated[
        bool, Parameter(help="With --no-ui: events as JSON lines.", negative="")
    ] = False,
    device: Annotated[
        str | None, Parameter(help='"auto", "all", or names such as "cpu" or "cuda:0,cuda:1".')
    ] = None,
    threads: Annotated[
        int | None, Parameter(help="Torch threads; 0 = physical cores minus one.")
    ] = None,
    run: Annotated[
        tuple[str, ...] | None, Parameter(help="Help only this run; may be repeated.", negative="")
    ] = None,
    max_tasks: Annotated[
        int | None,
        Parameter(help="Exit after this many submitted tasks.", validator=Number(gte=1)),
    ] = None,
    paused: Annotated[bool, Parameter(help="Start paused.", negative="")] = False,
    ascii: Annotated[
        bool | None, Parameter(help="Draw with ASCII characters only.", negative="")
    ] = None,
    language: Annotated[
        str | None, Parameter(help='Language of the program: "auto", "en", "de" or "es".')
    ] = None,
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            help="Any other setting, as NAME=VALUE; see `volunteer settings`.",
            negative="",
        ),
    ] = (),
    profile: Profile = "",
) -> int:
    """Train. Joins first where VOLUNTEER_JOIN holds a link."""
    if json and not no_ui:
        raise BadRequest(Sentence("--json is for --no-ui: the screen prints no events"))
    flags: dict[str, object] = dict(_pair(text) for text in set_)
    overrides = {"device": device, "threads": threads, "runs": run, "max_tasks": max_tasks}
    overrides |= {"ascii": ascii, "language": language}
    flags |= {name: value for name, value in overrides.items() if value is not None}
    from volunteer.cli.start import StartOptions, work

    return work(
        StartOptions(profile=profile, flags=flags, screen=not no_ui, json=json, paused=paused)
    )


@app.command
def join(
    *link: Annotated[str, Parameter(help="The link from your organiser; put it in quotes.")],
    name: Annotated[str, Parameter(help="Your nickname; empty = a generated one.")] = "",
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Join a coordinator. May be repeated: the same machine keeps its account."""
    from shared.text import printable
    from volunteer.cli.start import join_now

    if not link:
        return print_error(
            _("the link is missing: `volunteer join 'LINK'`, with the link of your organiser"),
            EXIT_USAGE,
        )
    # An unquoted link that a mail broke into lines arrives as several arguments.
    joined = _run(join_now(_directories(profile), " ".join(link), name))
    if json:
        return print_json(joined)
    greeting = (
        _('welcome, "{nickname}"', nickname=joined.nickname)
        if joined.created
        else _('already joined, "{nickname}"', nickname=joined.nickname)
    )
    where = _(
        "{met}: {server} at {url}, key {key}",
        met=greeting,
        server=joined.server,
        url=joined.url,
        key=joined.fingerprint,
    )
    print(printable(where))
    if name.strip() not in ("", joined.nickname):
        notice = _(
            "the nickname stays: ask your organiser for another (`coordinator volunteer rename`)"
        )
        print(notice)
    for run in joined.own_data[:RUNS_NAMED]:
        how = _("{run} learns from your own files: `volunteer data add {run} PATH`", run=run)
        print(printable(with_profile(how, profile)))
    print(with_profile(_("next: `volunteer`, or `volunteer --no-ui`"), profile))
    return 0


@app.command
def link(
    *,
    qr: Annotated[bool, Parameter(help="Show it as a QR code too.", negative="")] = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """A ten-minute code that adds another machine to your account."""
    code = prompt_commands.ask_account(profile, lambda api: api.link_code())
    if json:
        return print_json(code)
    print(_("on the other machine, within ten minutes:"))
    print(f"\n    volunteer join '{code.link}'\n")
    if qr:
        from shared.network.qr import qr_coloured

        print(qr_coloured(code.link, "    "))
    return 0


@app.command
def benchmark(
    *,
    quick: Annotated[
        bool, Parameter(help="About 2 seconds per device instead of 12.", negative="")
    ] = False,
    device: Annotated[str, Parameter(help='"auto", "all" or names.')] = "all",
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Measure the devices of this machine."""
    from volunteer.cli.benchmark_command import measure

    return measure(_directories(profile), device, quick=quick, json=json)


@app.command
def status(*, json: Json = False, profile: Profile = "") -> int:
    """Show what the running volunteer does, or why it is idle."""
    from volunteer.headless import status_lines

    report = _run(_with_control(profile, _status))
    if json:
        return print_json(report)
    print(with_profile("\n".join(status_lines(report)), profile))
    return 0


@app.command
def settings(*, json: Json = False, profile: Profile = "") -> int:
    """Every setting, its value, and the source of the value."""
    from shared.settings import plain_text
    from volunteer.cli.start import setting_rows

    rows = setting_rows(_directories(profile))
    if json:
        return print_json(rows)
    print_table(
        [_("name"), _("value"), _("from"), _("meaning")],
        [[row.name, plain_text(row.value) or "-", _(row.source), _(row.help)] for row in rows],
    )
    return 0


@app.command
def pause(
    device: Device = "",
    *,
    length: Annotated[
        str, Parameter(name="--for", help="Only for so long: 45m, 2h, 1h30m, 1d.")
    ] = "",
    until: Annotated[
        str, Parameter(help='Only until a time of day such as 22:00, or "login": the next log-in.')
    ] = "",
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Free the device and keep its task."""
    from datetime import datetime

    from volunteer.control.commands import NEXT_LOGIN, Pause, pause_end

    words, ends_at = pause_end(length, until, datetime.now().astimezone())
    login = ends_at == NEXT_LOGIN
    _run(
        _with_control(
            profile,
            lambda control: control.do(Pause(device=device, until=words, ends_at=ends_at)),
        )
    )
    if json:
        order: dict[str, object] = {"ordered": "pause", "device": device}
        order["ends_at"] = ends_at if ends_at > 0 else None
        return print_json(order | ({"until": "login"} if login else {}))
    sentence = _("{device} paused", device=device) if device else _("paused")
    if ends_at:
        sentence = _("{paused} until {time}", paused=sentence, time=_(words))
    print(with_profile(_("{pause}; continue with `volunteer resume`", pause=sentence), profile))
    return 0


@app.command
def resume(device: Device = "", *, json: Json = False, profile: Profile = "") -> int:
    """Resume after pause or finish."""
    from volunteer.control.commands import Resume

    _run(_with_control(profile, lambda control: control.do(Resume(device=device))))
    if json:
        return print_json({"ordered": "resume", "device": device})
    print(with_profile(_("resumed; `volunteer status` shows what it does"), profile))
    return 0


@app.command
def finish(
    *,
    then_stop: Annotated[
        bool, Parameter(help="Exit when the task is submitted.", negative="")
    ] = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Complete the current task, then take no more work."""
    from volunteer.control.commands import Finish, Stop

    order = Stop(how="finish") if then_stop else Finish()
    _run(_with_control(profile, lambda control: control.do(order)))
    if json:
        return print_json({"ordered": "finish", "then_stop": then_stop})
    sentence = (
        _("the current task is completed, then volunteer exits")
        if then_stop
        else _("the current task is completed; no new one is taken until `volunteer resume`")
    )
    print(with_profile(sentence, profile))
    return 0


@app.command
def stop(
    *,
    save: Annotated[
        bool, Parameter(help="Keep the task for the next start instead.", negative="")
    ] = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """End the running volunteer; its task is given back unless it needs only seconds more."""
    from volunteer.control.commands import Stop

    how: Literal["save", "release"] = "save" if save else "release"
    _run(_with_control(profile, lambda control: control.do(Stop(how=how))))
    if json:
        return print_json({"ordered": "stop", "how": how})
    print(
        _("volunteer exits; a current task is kept for the next start")
        if save
        else _("volunteer exits; a current task is given back, or done within seconds")
    )
    return 0


@app.command
def play(
    run: Annotated[str, Parameter(help="A run that learns a game.")],
    *,
    version: Annotated[int | None, Parameter(help="Version to play; default: the newest.")] = None,
    level: Annotated[
        Literal["easy", "middle", "hard"], Parameter(help="How far it looks ahead.")
    ] = "middle",
    profile: Profile = "",
) -> int:
    """Play against a version of a run, on a board in this terminal."""
    from shared.workloads.games import LEVELS
    from volunteer.cli.start import Match
    from volunteer.cli.start import play as begin

    if not exit_codes.at_terminal():
        return print_error(_("the board needs a terminal: run `volunteer play` in one"), EXIT_USAGE)
    match = Match(run=run, version=version, level=LEVELS.index(level))
    return begin(_directories(profile), match)


app.command(workload)
app.command(export)
manage.add_to(app)
prompt_commands.add_to(app)
app.register_install_completion_command()
add_help(app)
GROUPS = {
    "Begin": ("join", "link", "benchmark", "service"),
    "Watch": ("status", "runs", "logs", "settings"),
    "Steer": ("pause", "resume", "finish", "stop", "data"),
    "Use what you earned": (
        "generate",
        "chat",
        "play",
        "export",
        "key",
        "usage",
        "give",
        "receipts",
    ),
    "Look after": ("name", "update", "leave", "uninstall", "workload"),
}
group(app, GROUPS)


def run_command(argv: list[str]) -> int:
    """Return the exit code of a command line; errors are sentences on standard error."""
    return exit_codes.exit_code(lambda: _run_parsed(argv))


def _run_parsed(argv: list[str]) -> object:
    try:
        command, bound, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        from shared.programs.usage_errors import mistake

        _set_language({"json": "--json" in argv})
        return print_error(translated(mistake("volunteer", error, argv, app)), EXIT_USAGE)
    _set_language(bound.arguments)
    try:
        words, _rest, _more = app.parse_commands(argv)
        # `start` reports its own waits, and confines the process before any thread begins, such as
        # the thread of a watch
        if not words:
            return command(*bound.args, **bound.kwargs)
        with watch_silence(" ".join(("volunteer", *words)), translated):
            return command(*bound.args, **bound.kwargs)
    except VolunteerError as error:
        error.message = with_profile(translated(error.message), bound.arguments.get("profile", ""))
        raise


def _set_language(arguments: Mapping[str, Any]) -> None:
    """Set the language from the command line, else the settings, else the environment.
    Machine-readable output is never translated. The command that needs the settings reports their
    errors.
    """
    from volunteer.i18n.catalogue import AUTO, LanguageChoice, choose, use
    from volunteer.settings.settings import load

    exit_codes.print_errors_as_json(arguments.get("json", False))
    if arguments.get("json"):
        use(LanguageChoice())
        return
    language = arguments.get("language") or AUTO
    with suppress(VolunteerError, OSError):
        path = _directories(arguments.get("profile", "")).config / "config.toml"
        language = load(
            {"language": arguments.get("language")}, path=path
        ).settings.display.language
    use(choose(language))


def _directories(profile: str) -> Directories:
    from volunteer.settings.settings import directories

    return exit_codes.with_rename_remark(directories(profile=profile))


def _run(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(work)


async def _with_control(profile: str, act: Callable[[Control], Awaitable[T]]) -> T:
    """Run an action on this profile's running volunteer. Raises Unreachable if no volunteer
    runs.
    """
    from shared.clock import SystemClock
    from volunteer.account.profile_directory import Profile as ProfileDirectory
    from volunteer.control.local_socket import attach

    endpoint = ProfileDirectory(_directories(profile).profile).endpoint
    async with attach(endpoint, SystemClock()) as control:
        return await act(control)


async def _status(control: Control) -> Status:
    return control.status


def _pair(text: str) -> tuple[str, object]:
    from volunteer.settings.settings import TABLE

    name, equals, value = text.partition("=")
    if not equals:
        raise BadRequest(Sentence('--set takes NAME=VALUE, not "{text}"', text=text))
    return name.strip(), TABLE.listed(name.strip(), value)

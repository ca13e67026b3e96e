"""Commands that start a volunteer with or without a screen, join, and query the coordinator.

The agent and its libraries (numpy, httpx) are imported after the first paint of the screen.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from shared.clock import SystemClock
from shared.errors import BadRequest, Configuration, Unreachable, VolunteerError
from shared.files.deletions import delete_folder
from shared.programs import gc_freeze
from shared.programs.silence_watch import pause_watch
from shared.sentences import Sentence
from volunteer.account.instance_lock import ProfileAtWork, instance_lock
from volunteer.account.profile_directory import Identity, Profile
from volunteer.cli.exit_codes import (
    at_terminal,
    confirm,
    errors_are_json,
    remark,
    with_profile,
    with_rename_remark,
)
from volunteer.files import exports, private_directory, set_aside
from volunteer.i18n.catalogue import N_, LanguageChoice, _, choose, translated, use
from volunteer.machine import priority
from volunteer.settings import settings as config
from volunteer.settings.display import Display
from volunteer.settings.settings import Directories, Settings

if TYPE_CHECKING:
    from shared.settings import SettingRow
    from volunteer.account.join import Connect
    from volunteer.control.commands import Joined
    from volunteer.engine import Engine
    from volunteer.headless import Headless
    from volunteer.net.api import Api
    from volunteer.net.client import Client
    from volunteer.net.tls import Address
    from volunteer.tui.absence_digest import Visits
    from volunteer.tui.app import VolunteerApp
    from volunteer.tui.appearance import Look

LAST_LINES_S = 5.0
TRY_S = 0.05
PORTS = {"https": 443, "socks5": 1080, "socks5h": 1080}  # default ports of schemes
KEEPS_RUNNING = N_(
    "the volunteer keeps running in the background: `volunteer status` shows it, `volunteer "
    "stop` ends it"
)
NOT_JOINED = Sentence(
    "this profile has joined no coordinator yet: `volunteer join LINK`, with the link of your "
    "organiser"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options of the command line."""

    profile: str = ""
    flags: Mapping[str, object] = field(default_factory=dict)
    screen: bool = True
    json: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Opponent of `volunteer play`: its run, version and level."""

    run: str
    version: int | None = None  # None = the newest
    level: int = 1


def work(options: StartOptions) -> int:
    """Work until stopped; return the exit code.

    Raises Configuration and other errors before the start.
    """
    if options.screen and not at_terminal():
        raise BadRequest(Sentence("the screen needs a terminal: use `volunteer --no-ui`"))
    if options.screen and os.environ.get("TERM") == "dumb":
        raise BadRequest(Sentence("this terminal (TERM=dumb) cannot draw: use `volunteer --no-ui`"))
    directories = with_rename_remark(config.directories(profile=options.profile))
    settings = _settings(options, directories)
    language = choose(settings.display.language)
    # machine-readable output is the same in every language
    use(LanguageChoice() if options.json else language)
    if language.problem:
        remark(language.problem)
    for variable in config.TABLE.ignored(os.environ):
        remark(_("{variable} is ignored: no setting has this name", variable=variable))
    logging.basicConfig(stream=sys.stderr, level=settings.log_level.upper())
    profile = Profile(directories.profile)
    announced = False
    while True:  # an earlier instance frees the lock once its process has ended
        with ExitStack() as stack:
            if _take_lock(profile, stack, options):
                if not options.screen and settings.priority == "low":
                    priority.lower_process()
                listener = _confine(settings, directories, screen=options.screen)
                gc_freeze.freeze()
                return asyncio.run(_work(options, directories, settings, listener))
        outcome = asyncio.run(_attach(options, profile, settings)) if options.screen else ""
        if isinstance(outcome, int):
            return outcome
        if not announced:
            remark(
                outcome
                or _("another one is starting or exiting on this profile: waiting; Ctrl-C gives up")
            )
            announced = True
        time.sleep(TRY_S)


def _take_lock(profile: Profile, stack: ExitStack, options: StartOptions) -> bool:
    """Return True if this process now holds the profile's lock. Raises ProfileAtWork if another
    instance holds it and there is no screen to show that instance.
    """
    try:
        stack.enter_context(instance_lock(profile.path))
    except ProfileAtWork:
        if profile.endpoint.exists() and not options.screen:
            raise
        return False
    return True


def _confine(settings: Settings, directories: Directories, *, screen: bool) -> socket.socket | None:
    """Confine this process to its own folders and its memory limit, before its threads begin.
    Return the listening socket, which a confined process cannot make.
    """
    if not settings.sandbox:
        return None
    from volunteer.machine import memory_limit, sandbox

    listener = None
    if sandbox.landlock_version():
        from volunteer.control.local_socket import listen
        from volunteer.machine import sandbox_helper

        listener = listen(Profile(directories.profile).endpoint)
        writable = [directories.profile, directories.cache, Path(listener.getsockname()).parent]
        with suppress(OSError):  # without a writable home there are no exports
            if screen:
                exports().mkdir(exist_ok=True)
                writable.append(exports())
        temporary = directories.cache / "tmp"
        delete_folder(temporary, "scratch")
        sandbox_helper.begin(_helper_jobs(directories.config / "config.toml"))
        ports = _ports(directories, settings)
        sandbox.confine(writable, directories.config, private_directory(temporary), ports)
    memory_limit.limit(settings.memory_gb)
    return listener


def _helper_jobs(path: Path) -> Mapping[Callable[..., object], Callable[..., object]]:
    """Return the jobs outside of the sandbox, each with the function that checks its arguments."""
    from volunteer.machine.presence import GNOME_IDLE, run_here, x11_unused_s
    from volunteer.machine.sandbox_helper import open_page
    from volunteer.machine.surroundings import LINUX_METERED

    def save(_: str, changes: Mapping[str, object]) -> None:
        if not changes.get("sandbox", True):
            raise Configuration(
                Sentence(
                    "the program cannot leave its sandbox: write `sandbox = false` into {path}",
                    path=path,
                )
            )
        config.save(path, changes)

    def read(command: Sequence[str]) -> str:
        return run_here(command) if tuple(command) in (GNOME_IDLE, LINUX_METERED) else ""

    return {config.save: save, run_here: read, x11_unused_s: x11_unused_s, open_page: open_page}


def _ports(directories: Directories, settings: Settings) -> Collection[int] | None:
    """Return the TCP ports of the coordinator and other servers; None without a coordinator."""
    from shared.network.links import parse_link

    link = os.environ.get(config.JOIN, "")
    addresses = [os.environ.get("HF_ENDPOINT", "")]
    addresses += urllib.request.getproxies().values()
    try:
        identity = Profile(directories.profile).current()
        if identity is not None:
            addresses.append(identity.url)
        elif not link:
            return None
        if link:
            addresses.append(parse_link(link).url)
        parts = [urlsplit(a if "://" in a else f"http://{a}") for a in addresses if a]
        return {443, 53, *(part.port or PORTS.get(part.scheme, 80) for part in parts)}
    except (VolunteerError, ValueError):  # the reader of the link or profile reports the error
        return None


def _settings(options: StartOptions, directories: Directories) -> Settings:
    """Return the effective settings.

    A person at the screen may put a damaged file aside and continue; otherwise raises
    Configuration.
    """
    path = directories.config / "config.toml"
    try:
        return config.load(options.flags, path=path).settings
    except Configuration as error:
        if not (options.screen and path.exists()):
            raise
        remark(translated(error.message))
        if not confirm(N_("Set the file aside and continue with the defaults?")):
            raise
        remark(_("it is kept as {path}", path=set_aside(path)))
        return config.load(options.flags, path=path).settings


async def _work(
    options: StartOptions,
    directories: Directories,
    settings: Settings,
    listener: socket.socket | None,
) -> int:
    profile = Profile(directories.profile)
    link = os.environ.get(config.JOIN, "")
    if link:
        await _join_unattended(directories, settings, link)
    if not options.screen and profile.current() is None:
        raise Configuration(NOT_JOINED)
    # Measuring and training wait for the owner at a first start with a screen.
    first = options.screen and not link and _never_worked(profile)

    def engine() -> Engine:
        from volunteer.engine import Engine, World

        return Engine(
            directories,
            options.flags,
            world=World(listener=listener),
            start_paused=options.paused or first,
            ask_first=first,
        )

    if options.screen:
        from volunteer.tui.app import VolunteerApp

        screen = VolunteerApp(look=_look(settings, first=first), visits=_visits(profile))
        return await _with_screen(engine, screen, settings.priority == "low")
    program = engine()
    from volunteer.headless import Headless

    now = program.world.clock.now()
    front = Headless(program.control, sys.stdout, json=options.json, since=now)
    return await _without_screen(program, front)


async def _without_screen(engine: Engine, front: Headless) -> int:
    from volunteer.machine import watchdog

    watchdog.watch(asyncio.get_running_loop())
    _obey_signals(engine)
    drawing = asyncio.create_task(front.run())
    drawing.add_done_callback(lambda _: engine.stop("save"))  # no effect if the engine ends
    await asyncio.sleep(0)  # `front` subscribes before the first event
    code = await engine.run()
    await asyncio.wait({drawing}, timeout=LAST_LINES_S)  # the output may have no reader
    if drawing.done():
        drawing.result()
    return code


def _never_worked(profile: Profile) -> bool:
    """Return True if this profile has never worked."""
    identity = profile.current()
    return identity is None or not profile.home(identity).memory.benchmarks


def _look(settings: Settings, *, first: bool) -> Look:
    """Return the owner's display settings, and the page to open first."""
    from volunteer.tui.appearance import look_of

    return look_of(settings.display, os.environ, "onboarding" if first else "dashboard")


def _visits(profile: Profile) -> Visits:
    """Return the owner's visits to the screen of this profile."""
    from volunteer.tui.absence_digest import Visits

    return Visits(profile.path / "last-look.json")


async def _with_screen(make: Callable[[], Engine], screen: VolunteerApp, low: bool) -> int:
    """Run the screen on the agent's event loop; end the agent when the screen ends. Return the exit
    code.
    """
    drawing = asyncio.create_task(screen.run_async())
    engine = await _engine_after_first_paint(screen, drawing, make, low)
    if engine is None:
        return await drawing or 0
    working = asyncio.create_task(engine.run())
    code = await drawing
    if screen.app_exit.at_once:
        working.cancel()
        return code or 0
    if not working.done():
        engine.stop("save")
    result = await working
    _last_words(screen.app_exit.farewell)
    return result or code or 0


async def _engine_after_first_paint(
    screen: VolunteerApp,
    drawing: asyncio.Task[int | None],
    make: Callable[[], Engine],
    low: bool,
) -> Engine | None:
    """Make the engine once the screen is painted; None if the screen was closed before."""
    painted = asyncio.create_task(screen.painted.wait())
    await asyncio.wait({painted, drawing}, return_when=asyncio.FIRST_COMPLETED)
    painted.cancel()
    if low:  # not earlier: the first paint must not wait for other programs
        priority.lower_behind_screen()
    if not drawing.done():
        # Import in a thread, so that the screen handles keys meanwhile.
        await asyncio.to_thread(importlib.import_module, "volunteer.engine")
    if drawing.done():
        return None
    engine = make()
    screen.call_later(screen.attach, engine.control)
    return engine


async def _attach(options: StartOptions, profile: Profile, settings: Settings) -> int | str:
    """Open the screen of the running instance and return its exit code; a sentence if that instance
    does not answer, "" if no instance listens.
    """
    from volunteer.control.local_socket import SilentVolunteer, attach

    async with AsyncExitStack() as attached:
        try:
            control = await attached.enter_async_context(attach(profile.endpoint, SystemClock()))
        except SilentVolunteer as error:
            return error.message
        except Unreachable:
            return ""
        from volunteer.tui.app import VolunteerApp

        look = _look(settings, first=False)
        if ignored := _ignored(options):
            look = msgspec.structs.replace(look, notice=ignored)
        screen = VolunteerApp(control, look=look, visits=_visits(profile))
        code = await screen.run_async() or 0
        _last_words(screen.app_exit.farewell or with_profile(_(KEEPS_RUNNING), options.profile))
        return code


def _ignored(options: StartOptions) -> str:
    """Return a sentence on the options that a running volunteer does not take; "" without such
    options.
    """
    names = [name for name in options.flags if name not in Display.__struct_fields__]
    if options.paused:
        names.append("paused")
    if not names:
        return ""
    return _(
        "this volunteer runs already: what the command line says about {settings} has no effect",
        settings=", ".join(names),
    )


def _last_words(text: str) -> None:
    """Print the text that stays in the terminal after the screen."""
    try:
        print(text, end="\n" if text else "", flush=True)
    except OSError:
        pass  # the window is gone too


def _obey_signals(engine: Engine) -> None:
    """Let the first signal end the engine in order, the second end the process at once."""
    interrupted = False

    def obey(name: str) -> None:
        nonlocal interrupted
        if interrupted:
            os._exit(1)
        interrupted = True
        remark(
            _(
                "{signal}: finishing or giving the task back, then exiting; a second signal exits "
                "at once",
                signal=name,
            )
        )
        engine.stop("release")

    loop = asyncio.get_running_loop()
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is None:
            continue
        try:
            loop.add_signal_handler(number, obey, name)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_, n=name: loop.call_soon_threadsafe(obey, n))


async def _join_unattended(directories: Directories, settings: Settings, link: str) -> None:
    """Join by VOLUNTEER_JOIN. An unreachable coordinator is an error only if this profile has no
    account yet.
    """
    from volunteer.net.api import ASK_S

    try:
        await _join(directories, settings, link, "", ASK_S)
    except Unreachable:
        if Profile(directories.profile).current() is None:
            raise


async def _join(
    directories: Directories, settings: Settings, link: str, name: str, patience_s: float = 0.0
) -> Joined:
    from shared.network.links import parse_link
    from volunteer.account.join import Enrolment, connector, join

    enrolment = Enrolment(
        profile=Profile(directories.profile),
        settings=settings,
        connect=with_retry_remarks(connector(SystemClock())),
        progress=_remark_proof_of_work,
    )
    return await join(parse_link(link), name, enrolment, patience_s)


def with_retry_remarks(connect: Connect) -> Connect:
    """Return a `Connect` whose clients print once that they retry."""

    def connect_with_remark(address: Address, token: str) -> Client:
        client = connect(address, token)

        def say(online: bool, message: str, retry_at: float | None) -> None:
            if retry_at is not None and not errors_are_json():
                client.watch = None
                remark(_("retrying: {error}", error=message))

        client.watch = say
        return client

    return connect_with_remark


def _remark_proof_of_work(bits: int, done: float) -> None:
    """Print once that joining needs some seconds of computation."""
    if done == 0.0:
        from shared.proofs.proof_of_work import search_time_text

        remark(
            _(
                "this coordinator is open to everybody: joining it takes about {time} of computing",
                time=search_time_text(bits),
            )
        )


async def join_now(directories: Directories, link: str, name: str) -> Joined:
    """Run `volunteer join`."""
    settings = config.load(path=directories.config / "config.toml").settings
    return await _join(directories, settings, link, name)


async def ask_coordinator(directories: Directories, question: Callable[[Api], Awaitable[T]]) -> T:
    """Query the coordinator with this profile's identity.

    Raises Configuration if the profile has no registered identity.
    """
    from volunteer.account.join import connector
    from volunteer.net.api import Api

    identity = identity_of(directories)
    client = connector(SystemClock())(identity.address, identity.token)
    try:
        return await question(Api(client))
    finally:
        await client.close()


def identity_of(directories: Directories) -> Identity:
    """Return the account of this profile. Raises Configuration before it is registered."""
    identity = Profile(directories.profile).current()
    if identity is None or not identity.registered:
        raise Configuration(NOT_JOINED)
    return identity


def play(directories: Directories, game: Match) -> int:
    """Run `volunteer play`. Raises Configuration without an account."""
    return asyncio.run(_play(directories, game))


async def _play(directories: Directories, game: Match) -> int:
    from volunteer.machine.devices import default_threads
    from volunteer.opponent import VersionOpponent
    from volunteer.tui.play.app import PlayApp

    settings = config.load(path=directories.config / "config.toml").settings
    identity = identity_of(directories)

    async def at_the_board(api: Api) -> int:
        with TemporaryDirectory(prefix="volunteer-play-") as cache:
            opponent = VersionOpponent(
                api,
                game.run,
                public_key=identity.public_key,
                enabled=settings.workloads,
                directory=Path(cache),
                threads=settings.threads or default_threads(),
            )
            screen = PlayApp(
                opponent,
                game.run,
                version=game.version,
                level=game.level,
                look=_look(settings, first=False),
            )
            try:
                with pause_watch():
                    return await screen.run_async() or 0
            finally:
                opponent.close()

    return await ask_coordinator(directories, at_the_board)


def setting_rows(directories: Directories) -> tuple[SettingRow, ...]:
    """Return the rows of `volunteer settings`."""
    return config.load(path=directories.config / "config.toml").rows

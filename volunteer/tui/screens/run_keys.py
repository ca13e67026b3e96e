"""Keys for one run, on Home and Runs: its samples, its model, its public page."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from textual.app import SuspendNotSupported

from shared.errors import Unreachable
from shared.protocol.accounts import RunInfo
from shared.workloads.declaration import refusal
from volunteer.i18n.catalogue import N_, _, translated
from volunteer.machine import sandbox_helper
from volunteer.tui.keys import KeyCommand

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp

SAMPLES = KeyCommand(
    key="m",
    action="samples",
    short=N_("samples"),
    help=N_("Show what the model of this run writes, draws or plays, version by version."),
    rank=31,
)
MODEL = KeyCommand(
    key="p",
    action="model",
    short=N_("ask/play"),
    help=N_("Talk with the model of this run, or play against it."),
    rank=34,
)
WEB = KeyCommand(
    key="o",
    action="web",
    short=N_("web page"),
    help=N_("Open the public page of this run in the browser."),
    rank=64,
)
SHARED = (SAMPLES, MODEL, WEB)
INTERRUPTED = 130  # exit code of a command that Ctrl-C ended
GRAPHICAL = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


def show_samples(app: VolunteerApp, run: str) -> None:
    """Open the viewer of samples."""
    from volunteer.tui.screens.version_samples import SamplesPage

    if run and app.control is not None:
        app.push_screen(SamplesPage(run))


def open_model(app: VolunteerApp, info: RunInfo | None) -> None:
    """Run `volunteer chat` or `play` in the terminal; say why not if the model does neither."""
    if info is None or app.control is None:
        return
    command = command_for(info)
    if not command:
        app.tell(translated(refusal(info.output, "ask", info.name) or ""))
        return
    app.run_worker(_run_in_terminal(app, command, info.name), group="lend", exclusive=True)


def command_for(info: RunInfo) -> str:
    """Return the command that uses the model of a run in the terminal; "" for a model that draws
    pictures or has no output.
    """
    return {"text": "chat", "moves": "play", "image": "", "none": ""}[info.output]


async def _run_in_terminal(app: VolunteerApp, word: str, run: str) -> None:
    """Run a command about a run in this terminal until it ends, in a process of its own, because a
    second thread with torch would slow the training down.
    """
    profile = app.latest.status.profile.partition("@")[0]
    command = [
        sys.executable,
        "-P",
        "-m",
        "volunteer",
        word,
        run,
        *(["--profile", profile] if profile else []),
    ]
    typed_command = f"volunteer {word} {run}"
    try:
        code = await lend_terminal(app, command)
    except SuspendNotSupported:
        app.tell(_("type this in another terminal: {command}", command=typed_command), "warning")
        return
    if code not in (0, INTERRUPTED, -signal.SIGINT):
        app.tell(
            _("this ended with an error: `{command}` shows it", command=typed_command), "error"
        )


async def lend_terminal(app: VolunteerApp, command: Sequence[str]) -> int:
    """Run a program that takes over the terminal until it ends; return its exit code, 1 if it
    cannot start. Raises SuspendNotSupported.
    """
    # the app draws nothing meanwhile
    with app.batch_update(), app.suspend(), app.app_exit.terminal_lent():
        return await _exit_code(command)


async def _exit_code(command: Sequence[str]) -> int:
    try:
        child = await asyncio.create_subprocess_exec(*command)
    except OSError:
        return 1
    try:
        return await child.wait()
    finally:
        if child.returncode is None:
            child.terminate()


def show_page(app: VolunteerApp, run: str) -> None:
    """Open a run's public page in a browser, which may take seconds to start; without a browser,
    show its address.
    """
    app.run_worker(_show_page(app, run), group="web", exclusive=True)


async def _show_page(app: VolunteerApp, run: str) -> None:
    coordinator = app.latest.status.coordinator
    if not run or not coordinator:
        app.tell(_("the address of the coordinator is not known yet"))
        return
    page = f"{coordinator.rstrip('/')}/runs/{quote(run, safe='')}"
    if await (app.opener or in_browser)(page):
        app.tell(_("opening {page} in the browser", page=page) + _public_remark(app))
        return
    from volunteer.tui.screens.copy_text import CopyText

    app.push_screen(
        CopyText(_("The public page"), _("Open this address to see {run}:", run=run), page)
    )


def _public_remark(app: VolunteerApp) -> str:
    """Return the remark that the page shows the owner's nickname, and how to hide it; "" if the
    nickname is hidden.
    """
    me = app.latest.status.me
    if me is None or not me.public:
        return ""
    return _("; your nickname is shown there, h on the page Ranks hides it")


async def in_browser(page: str) -> bool:
    """Open an address in this machine's browser; return False if no browser opens."""
    if not has_browser(os.environ):
        return False
    try:
        return await asyncio.to_thread(sandbox_helper.do, sandbox_helper.open_page, page)
    except Unreachable:
        return False


def has_browser(environ: Mapping[str, str]) -> bool:
    """Return True if the person at this terminal can see a browser window."""
    if any(environ.get(name) for name in ("SSH_CONNECTION", "SSH_TTY")):
        return False
    return sys.platform in ("darwin", "win32") or any(environ.get(name) for name in GRAPHICAL)

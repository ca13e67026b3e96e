"""Service that keeps `volunteer --no-ui` running on this machine: installed, started, removed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.errors import Configuration, why
from shared.files.deletions import delete_file
from shared.sentences import Sentence, sentence_of
from volunteer.files import private_directory, write_whole
from volunteer.service.service_units import Service, Target

COMMAND_S = 60.0
# Variables that move the folders of the program, which a service does not get from a shell.
PLACES = ("VOLUNTEER_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")


def target_here(
    *,
    profile: str = "",
    machine: bool = False,
    join: str = "",
    environ: Mapping[str, str],
    removing: bool = False,
) -> Target:
    """Return the target for this process; removal of a service skips the checks."""
    script = Path(sys.executable).with_name("volunteer.exe" if os.name == "nt" else "volunteer")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "volunteer"]
    environment = {name: environ[name] for name in PLACES if name in environ and not machine}
    if profile and profile != "default":
        environment["VOLUNTEER_PROFILE"] = profile
    return Target(
        program=(*program, "--no-ui"),
        home=Path.home(),
        uid=os.getuid() if hasattr(os, "getuid") else 0,
        machine=machine,
        environment=environment,
        join=join,
        groups=_gpu_groups() if machine else (),
        removing=removing,
    )


def install(service: Service) -> None:
    """Write the files and start the service; an installed service is restarted.

    Raises Configuration with the system's message.
    """
    if any(file.path.exists() for file in service.files):
        _run(service.stop[0], must=False)  # launchd refuses a loaded service
    for file in service.files:
        try:
            private_directory(file.path.parent)
            write_whole(file.path, file.data)
            file.path.chmod(0o600 if file.secret else 0o644)
        except OSError as error:
            raise Configuration(
                Sentence(
                    "{path} cannot be written: {why}",
                    path=file.path,
                    why=why(error),
                )
            ) from error
    for command in service.start:
        _run(command)


def remove(service: Service) -> bool:
    """Stop the service and remove its files; return False if no service was installed. Raises
    Configuration for a file that cannot be removed.
    """
    if not any(file.path.exists() for file in service.files):
        return False
    for command in service.stop[:1]:  # later commands may need the files to be gone
        _run(command, must=False)
    for file in service.files:
        try:
            delete_file(file.path, "asked")
        except OSError as error:
            raise Configuration(
                Sentence("{path} cannot be removed: {why}", path=file.path, why=why(error))
            ) from error
    for command in service.stop[1:]:
        _run(command, must=False)
    return True


def _run(command: tuple[str, ...], *, must: bool = True) -> None:
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Configuration(
            Sentence(
                "`{command}` could not be run: {why}", command=shlex.join(command), why=why(error)
            )
        ) from error
    if must and process.returncode != 0:
        raise Configuration(
            _failure_sentence(command, (process.stderr or process.stdout).strip().splitlines())
        )


def _failure_sentence(command: tuple[str, ...], output: list[str]) -> Sentence:
    """Return the system's error, with the remedy if it is known."""
    reason = sentence_of(output[-1].rstrip(".")) if output else Sentence("no reason was given")
    failed = Sentence("`{command}` failed: {why}", command=shlex.join(command), why=reason)
    if "--user" not in command or "bus" not in reason:
        return failed
    return Sentence(
        "{failed}. No systemd runs for this user, as in a container or after `su`: log in as this "
        "user and retry, or use `--system`; `volunteer service remove` deletes the files written",
        failed=failed,
    )


def _gpu_groups() -> tuple[str, ...]:
    """Return the groups that may open a GPU here and exist, since systemd refuses a missing
    group.
    """
    if sys.platform == "win32":
        return ()
    import grp

    return tuple(group.gr_name for group in grp.getgrall() if group.gr_name in ("render", "video"))

"""Build a release of the commit that is checked out, and try it: `make release`.

Writes to dist/ the wheel, the sdist, a CycloneDX bill of materials, and SHA256SUMS. Both archives
are built twice, in different folders, and have to be the same bytes; the wheel is built from the
sdist, which has to hold every file of the commit. The wheel is then installed in an empty
environment outside the source tree, where the demo and the tour of the README run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PACKAGES = ("volunteer", "coordinator", "shared")
# Each build gets its own; nothing of these may show in an archive.
SURROUNDINGS = ({"TZ": "UTC", "umask": "022"}, {"TZ": "Asia/Tokyo", "umask": "077"})
DEMO_MINUTES = "2"
TASKS = "3"  # that the volunteer of the tour does
START_S, COMMAND_S, STOP_S = 120, 900, 60
TOUR = "## Ten minutes"


class Failed(Exception):
    """A sentence that says what is missing or wrong."""


def say(*words: object) -> None:
    print(f"{time.strftime('%H:%M:%S')} ", *words, flush=True)


def run(*words: object, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command to its end and return what it printed. Raises Failed with its last lines."""
    command = [str(word) for word in words]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=os.environ | environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=COMMAND_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is not installed: make setup") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"`{shlex.join(command)}` ran longer than {COMMAND_S} s") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise Failed(f"`{shlex.join(command)}` ended with {done.returncode}:\n{last}")
    return done.stdout


def version() -> str:
    """Return the version to release. Raises Failed for a tree that is not what would be built."""
    if not (ROOT / ".git").exists():
        raise Failed("a release is built from a clone of the repository; there is no .git here")
    if changed := run("git", "status", "--porcelain"):
        raise Failed(f"commit or remove first, for a release is built of a commit:\n{changed}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    number = str(project["version"])
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(number)}\b", changes, re.MULTILINE):
        raise Failed(f"CHANGELOG.md has no heading `## {number}`")
    if not (kept := ROOT / "tests" / "golden" / f"released-{number}.tar.gz").exists():
        raise Failed(f"{kept.relative_to(ROOT)} is missing: python -m tests.support.released")
    return number


def build(folder: Path, surroundings: dict[str, str]) -> list[Path]:
    """Build the sdist from the commit and the wheel from the sdist; return both files."""
    mask, zone = int(surroundings["umask"], 8), surroundings["TZ"]
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    tree, out = folder / "tree", folder / "out"
    before = os.umask(mask)
    try:
        tree.mkdir(parents=True)
        archive = folder / "commit.tar"
        run("git", "archive", "--output", archive, "HEAD")
        run("tar", "-xf", archive, "-C", tree)
        built = (sys.executable, "-m", "hatchling", "build", "-d", out)
        run(*built, "-t", "sdist", cwd=tree, SOURCE_DATE_EPOCH=epoch, TZ=zone)
        (sdist,) = out.glob("*.tar.gz")
        run("tar", "-xzf", sdist, "-C", folder)
        unpacked = folder / sdist.name.removesuffix(".tar.gz")
        run(*built, "-t", "wheel", cwd=unpacked, SOURCE_DATE_EPOCH=epoch, TZ=zone)
        (wheel,) = out.glob("*.whl")
    finally:
        os.umask(before)
    return [wheel, sdist]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def complete(wheel: Path, sdist: Path) -> int:
    """Return how many files of the commit the sdist holds. Raises Failed if one is missing."""
    listed = run("git", "ls-files", "-z").split("\0")
    tracked = {name for name in listed if name}
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        installed = set(archive_of_wheel.namelist())
    ours = {name for name in tracked if name.split("/")[0] in PACKAGES}
    for what, missing in (("sdist", tracked - packed), ("wheel", ours - installed)):
        if missing:
            raise Failed(f"the {what} lacks {', '.join(sorted(missing)[:10])}: see pyproject.toml")
    return len(tracked)


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel in an environment that is empty but for it; return its folder."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install")
    quiet = ("--no-input", "--disable-pip-version-check", "--quiet")
    pinned = ("-c", ROOT / "packaging" / "constraints.txt")
    torch = shlex.split(os.environ.get("TORCH_ARGS", ""))
    run(*pip, *quiet, *pinned, *torch, "torch", cwd=folder)
    run(*pip, *quiet, *pinned, wheel, cwd=folder)
    return folder / "bin"


def bill(environment: Path, target: Path) -> int:
    """Write the bill of materials of an environment; return how many components it names."""
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    tool = Path(sys.executable).with_name("cyclonedx-py")
    run(
        tool, "environment", "--output-reproducible", "--pyproject", ROOT / "pyproject.toml",
        "--output-format", "JSON", "--output-file", target, environment, SOURCE_DATE_EPOCH=epoch,
    )  # fmt: skip
    components = json.loads(target.read_text(encoding="utf-8")).get("components", [])
    if not components:
        raise Failed(f"{target.name} names no component")
    return len(components)


def tour(readme: str) -> list[list[str]]:
    """Return the commands of the README's tour, as words."""
    _, found, rest = readme.partition(TOUR)
    section = rest.partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in "".join(blocks).splitlines()]
    commands = [words for words in lines if words and words[0] in ("coordinator", "volunteer")]
    if not found or not commands:
        raise Failed(f"README.md has no commands below `{TOUR}`")
    return commands


@contextmanager
def served(words: Sequence[str], folder: Path, **environment: str) -> Iterator[str]:
    """The join link of a server that runs meanwhile."""
    log = folder / "serve.log"
    with log.open("w") as lines:
        child = subprocess.Popen(
            words, cwd=folder, env=os.environ | environment, stdin=subprocess.DEVNULL,
            stdout=lines, stderr=lines,
        )  # fmt: skip
    try:
        until = time.monotonic() + START_S
        while not (link := re.search(r"volunteer join '(\S+)'", log.read_text())):
            if child.poll() is not None or time.monotonic() > until:
                raise Failed(f"`{shlex.join(words)}` printed no join link:\n{log.read_text()}")
            time.sleep(0.1)
        yield link[1]
        child.send_signal(signal.SIGTERM)
        if (code := child.wait(STOP_S)) != 0:
            raise Failed(f"`{shlex.join(words)}` ended with {code} after SIGTERM")
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def home_of(programs: Path, folder: Path) -> dict[str, str]:
    """Return the environment of somebody who has the installed programs and nothing else."""
    kinds = ("CONFIG", "DATA", "STATE", "CACHE")
    return {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in kinds} | {
        "HOME": str(folder),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": "",
        "COORDINATOR_PORT": "0",
    }


def travel(programs: Path, folder: Path) -> int:
    """Run the README's tour with an installed wheel; return how many commands it has."""
    home = home_of(programs, folder)
    serve, *rest = tour((ROOT / "README.md").read_text(encoding="utf-8"))
    if serve != ["coordinator", "serve"]:
        raise Failed("the tour of README.md does not begin with `coordinator serve`")
    with served([str(programs / serve[0]), *serve[1:]], folder, **home) as link:
        for words in rest:
            if words == ["volunteer"]:  # the screen needs a terminal
                continue
            if words[:2] == ["volunteer", "join"]:
                words = [link if "://" in word else word for word in words]
            if words == ["volunteer", "--no-ui"]:
                words = [*words, "--max-tasks", TASKS]
            say("   ", shlex.join(word if word != link else "LINK" for word in words))
            run(programs / words[0], *words[1:], cwd=folder, **home)
    return 1 + len(rest)


def demo(programs: Path, folder: Path) -> int:
    """Run the demo with an installed wheel; return the version of the model it reached."""
    words = ("demo", "--minutes", DEMO_MINUTES, "--json")
    said = run(programs / "coordinator", *words, cwd=folder, **home_of(programs, folder))
    summary = json.loads(said[said.index("{") :])
    reached = int(summary["versions"])
    if reached < 1:
        raise Failed(f"the demo merged nothing: {said}")
    return reached


def release(work: Path) -> list[str]:
    """Build and try a release in a temporary folder; return the lines of the summary."""
    number = version()
    turns = []
    for turn, surroundings in enumerate(SURROUNDINGS, 1):
        say(f"build {turn} of {len(SURROUNDINGS)}: sdist from the commit, wheel from the sdist")
        turns.append(build(work / f"build{turn}", surroundings))
    for first, second in zip(*turns, strict=True):
        if first.name != second.name or digest(first) != digest(second):
            raise Failed(f"{first.name} is not the same bytes twice: {first} {second}")
    wheel, sdist = turns[0]
    held = complete(wheel, sdist)
    say(f"the sdist holds all {held} files of the commit; both archives are the same bytes twice")
    say("install the wheel in an empty environment")
    programs = install(wheel, work / "environment")
    DIST.mkdir(exist_ok=True)
    bom = DIST / f"volunteer-{number}.cdx.json"
    components = bill(programs.parent, bom)
    say(f"the bill of materials names {components} components")
    for name in ("demo", "tour"):
        (work / name).mkdir()
    say(f"demo, {DEMO_MINUTES} minutes")
    reached = demo(programs, work / "demo")
    say(f"the demo reached version {reached}; tour of README.md:")
    commands = travel(programs, work / "tour")
    files = [*(Path(shutil.copy(each, DIST)) for each in (wheel, sdist)), bom]
    lines = [f"{digest(path)}  {path.name}" for path in files]
    (DIST / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sizes = [f"  {path.stat().st_size / 1e6:6.2f} MB  {path.name}" for path in files]
    return [
        f"release {number}: {held} files, {components} components, the same bytes twice;"
        f" demo to version {reached}, {commands} commands of the tour",
        *sizes,
        *(f"  {line}" for line in lines),
    ]


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="volunteer-release-") as work:
        try:
            lines = release(Path(work))
        except Failed as error:
            print(f"release: {error}", file=sys.stderr)
            return 1
    print(*lines, f"built and tried in {time.monotonic() - began:.0f} s: {DIST}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The volunteer's settings: who wins, what is refused and how, and that nothing a person wrote is
lost.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadRequest, Configuration
from tests.support.sources import ROOT
from volunteer.cli.main import run_command
from volunteer.settings import settings as config
from volunteer.settings.display import Display
from volunteer.settings.settings import Settings
from volunteer.settings.work_rules import WorkRules


def load(path: Path, flags: dict[str, Any] | None = None, **environ: str) -> config.LoadedSettings:
    return config.load(flags, environ=environ, path=path / "config.toml")


def write(path: Path, text: str) -> None:
    (path / "config.toml").write_text(text, encoding="utf-8")


def test_settings_are_listed_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["settings"]) == 0
    words = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert (words["schedule"], words["ascii"], words["idle_minutes"]) == ("-", "false", "5")


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    write(tmp_path, "threads = 1\ncache_gb = 2.5\nmax_tasks = 3\n")
    environ = {"VOLUNTEER_THREADS": "2", "VOLUNTEER_MAX_TASKS": "4"}
    loaded = load(tmp_path, {"threads": 3, "device": None}, **environ)
    assert (loaded.settings.threads, loaded.settings.max_tasks) == (3, 4)
    assert (loaded.settings.cache_gb, loaded.settings.device) == (2.5, "auto")
    said = loaded.sources
    assert (said["threads"], said["max_tasks"]) == ("flag", "environment")
    assert (said["cache_gb"], said["device"]) == ("config.toml", "default")


def test_every_setting_works_as_a_variable(tmp_path: Path) -> None:
    environ = {
        "VOLUNTEER_RUNS": "one, two",
        "VOLUNTEER_PUBLIC": "false",
        "VOLUNTEER_CACHE_GB": "0.5",
        "VOLUNTEER_CONSENT": "asked",
        "VOLUNTEER_JOIN": "no setting",
        "VOLUNTEER_SOMETHING_OF_ANOTHER_PROGRAM": "1",
        "HOME": "/home/ann",
    }
    settings = load(tmp_path, None, **environ).settings
    assert settings.runs == ("one", "two")
    assert (settings.public, settings.cache_gb, settings.consent) == (False, 0.5, "asked")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thread = 2", ['unknown setting "thread"', 'did you mean "threads"?']),
        ('threads = "many"', ["threads", "expected a whole number, not a text"]),
        ("threads = -1", ["threads", "expected a whole number of at least 0"]),
        ('consent = "maybe"', ["consent", "maybe"]),
        ("threads = ", ["is not TOML", "move it away"]),
        ("threads: 2\n", ["is not TOML (line 1: this is YAML", "move it away"]),
        ('{"threads": 2}', ["is not TOML (line 1: this is JSON"]),
        ("metered = pause\n", ['(line 1: a text stands in quotes: "pause")']),
        ("threads = " + "[" * 5_000, ["nests more than 32 tables or lists", "move it away"]),
        ("threads = " + "9" * 6_000, ["a number that is too large", "move it away"]),
    ],
    ids=lambda given: given[:40] if isinstance(given, str) else given[0],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    write(tmp_path, text)
    with pytest.raises(Configuration) as caught:
        load(tmp_path)
    assert "config.toml" in caught.value.message
    assert all(word in caught.value.message for word in words)


@pytest.mark.parametrize("flags", [{"nonsense": "1"}, {"max_tasks": -1}, {"threads": "many"}])
def test_a_mistake_on_the_command_line_is_one_of_usage(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest, match="the command line: ") as caught:
        load(tmp_path, flags)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("threads", "1.5", "expected a whole number"),
        ("metered", "cheap", '\'cheap\' is not one of "pause", "work"'),
    ],
)
def test_what_is_typed_is_not_refused_for_being_a_text(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        load(tmp_path, {name: text})
    assert caught.value.message == f'the command line: setting "{name}": {says}'


def test_a_slip_in_a_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(Configuration, match="did you mean VOLUNTEER_THREADS"):
        load(tmp_path, VOLUNTEER_THREAD="2")
    with pytest.raises(Configuration, match="environment: setting"):
        load(tmp_path, VOLUNTEER_THREADS="two")


def test_saving_keeps_what_a_person_wrote(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    write(tmp_path, "# my machine\nthreads = 2  # quiet\ndevice = 'cpu'\n")
    config.save(path, {"threads": 4, "runs": ("a", "b")})
    text = path.read_text(encoding="utf-8")
    assert "# my machine" in text
    settings = load(tmp_path).settings
    assert (settings.threads, settings.device, settings.runs) == (4, "cpu", ("a", "b"))


WRITTEN = """\
# My machine, by the window.
threads = 2  # quiet

schedule = [   # when nobody is here
  "mon-fri 18:00-08:00",
  "sat-sun",  # all day
]
device = 'cpu'
not_known_yet = "of a newer version"

[device_roles]
# the old one
cpu = "train"
cuda = "play"
"""


def test_a_change_touches_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(WRITTEN, encoding="utf-8")
    config.save(
        path, {"threads": 4, "device": "cpu", "schedule": ("mon-fri 18:00-08:00", "sat-sun")}
    )
    assert path.read_text(encoding="utf-8") == WRITTEN.replace("threads = 2", "threads = 4")
    config.save(path, {"device_roles": {"cpu": "learn"}, "public": False})
    text = path.read_text(encoding="utf-8")
    assert tomllib.loads(text)["device_roles"] == {"cpu": "learn"}
    kept = WRITTEN.replace("threads = 2", "threads = 4").replace('"train"', '"learn"')
    for line in kept.splitlines():
        assert line in text or line.startswith("cuda")
    assert tomllib.loads(text)["public"] is False
    assert path.stat().st_mode & 0o077 == 0
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]


def test_the_lines_of_windows_stay(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"# mine\r\nthreads = 2\r\n")
    config.save(path, {"threads": 3})
    assert path.read_bytes() == b"# mine\r\nthreads = 3\r\n"


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, WRITTEN)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(Configuration, match="no space left"):
        config.save(tmp_path / "config.toml", {"threads": 4})
    assert (tmp_path / "config.toml").read_text(encoding="utf-8") == WRITTEN


def test_saving_over_several_lines_loses_no_value(tmp_path: Path) -> None:
    write(tmp_path, 'runs = [\n  "a",\n  "b",\n]\nthreads = 2\n')
    config.save(tmp_path / "config.toml", {"runs": ("c",)})
    settings = load(tmp_path).settings
    assert (settings.runs, settings.threads) == (("c",), 2)


def test_what_makes_no_sense_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(Configuration):
        config.save(tmp_path / "config.toml", {"threads": "x"})
    assert not (tmp_path / "config.toml").exists()


@given(name=st.text(max_size=30), runs=st.lists(st.text(max_size=10), max_size=3))
def test_any_text_survives_saving(
    tmp_path_factory: pytest.TempPathFactory, name: str, runs: list[str]
) -> None:
    path = tmp_path_factory.mktemp("config")
    device = name or "cpu"
    config.save(path / "config.toml", {"device": device, "runs": tuple(runs)})
    settings = load(path).settings
    assert (settings.device, settings.runs) == (device, tuple(runs))


def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "absent" / "config.toml"
    with pytest.raises(
        Configuration, match=r"config\.toml cannot be written: no such file"
    ) as told:
        config.save(missing, {"threads": 2})
    assert str(missing) in told.value.message


@pytest.mark.parametrize("text", ["inf", "1e300", "nan"])
def test_a_number_without_measure_is_refused_for_every_setting(tmp_path: Path, text: str) -> None:
    numbers = [row.name for row in config.TABLE.rows() if isinstance(row.value, float)]
    assert "memory_gb" in numbers
    for name in numbers:
        write(tmp_path, f"{name} = {text}\n")
        with pytest.raises(Configuration, match=rf"{name}.*expected a number of at "):
            load(tmp_path)


def test_every_setting_is_described() -> None:
    rows = config.TABLE.rows()
    assert [row.name for row in rows] == list(config.TABLE.names)
    parts = (WorkRules, Display, Settings)
    fields = [name for part in parts for name in part.__struct_fields__]
    assert sorted([*config.TABLE.names, "rules", "display"]) == sorted(
        fields
    )  # no name stands for two
    assert all(
        config.TABLE.value(Settings(), row.name) == config.TABLE.default(row.name) for row in rows
    )
    assert all(row.help.endswith((".", ")")) and row.type for row in rows)


def test_directories_lie_below_one_home_and_belong_to_a_host(tmp_path: Path) -> None:
    environ = {"VOLUNTEER_HOME": str(tmp_path / "home")}
    found = config.directories(environ)
    assert found.profile.is_relative_to(tmp_path)
    assert found.cache.is_relative_to(tmp_path)
    assert found.profile.name.startswith("default@")
    assert found.profile.stat().st_mode & 0o077 == 0
    other = config.directories(environ, profile="second")
    assert other.profile != found.profile
    assert config.directories(environ | {"VOLUNTEER_PROFILE": "second"}).profile == other.profile
    for name in ("../up", ".hidden", "a/b", "x" * 65):
        with pytest.raises(Configuration, match="profile name"):
            config.directories(environ, profile=name)


def test_the_documentation_holds_the_table_of_settings() -> None:
    page = ROOT / "docs" / "volunteer-settings.md"
    text = page.read_text(encoding="utf-8")
    missing = [row.name for row in config.TABLE.rows() if row.line not in text]
    assert not missing, "paste the lines that row.line gives"


def test_a_device_takes_the_work_and_the_time_of_its_own(tmp_path: Path) -> None:
    table = '{ cpu = "play", "cuda:0" = "learn train" }'
    write(tmp_path, f'roles = ["train"]\ndevice_roles = {table}\ndevice_duty = {{ cpu = 40 }}\n')
    rules = load(tmp_path).settings.rules
    assert rules.kinds("cpu") == ("selfplay", "evaluate")
    assert rules.kinds("cuda:0") == ("learn", "train")
    assert rules.kinds("mps") == ("train",)
    assert (rules.device_duty, rules.duty_percent) == ({"cpu": 40}, 100)
    environ = {"VOLUNTEER_DEVICE_DUTY": "cuda:0=25", "VOLUNTEER_DEVICE_ROLES": "cpu=play learn"}
    rules = load(tmp_path, None, **environ).settings.rules
    assert rules.device_duty == {"cuda:0": 25}
    assert rules.roles_of("cpu") == ("play", "learn")
    assert set(WorkRules().kinds("cpu")) == {"train", "selfplay", "learn", "evaluate"}


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("DEVICE_ROLES", "cpu=dance", '"dance" is not a role; they are play, learn and train'),
        ("DEVICE_ROLES", "cpu=", "a role is missing"),
        ("DEVICE_ROLES", "gpu0=play", 'no device is called "gpu0"'),
        ("DEVICE_DUTY", "cpu=0", "5"),
        ("DEVICE_DUTY", "cpu=much", "a whole number"),
        ("ROLES", "learn,dance", "dance"),
    ],
)
def test_work_that_there_is_not_is_named(
    tmp_path: Path, variable: str, text: str, says: str
) -> None:
    with pytest.raises(Configuration) as error:
        load(tmp_path, None, **{f"VOLUNTEER_{variable}": text})
    assert says in error.value.message

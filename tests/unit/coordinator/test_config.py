"""Settings: who wins, and that every slip is named with its source and the nearest right word."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import TABLE, Settings, load, without_password
from shared.errors import BadRequest, Configuration
from tests.support.sources import ROOT


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def settings_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "coordinator.toml"
    path.write_text(text)
    return path


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = settings_file(
        tmp_path, 'port = 1\nname = "file"\ncontact = "file"\ninvite_only = true\n'
    )
    environ = {
        "COORDINATOR_PORT": "2",
        "COORDINATOR_NAME": "environment",
        "COORDINATOR_JSON_LOGS": "true",
    }
    found = load({"port": 3, "host": None}, environ=environ, config=file)
    assert (found.port, found.name, found.contact) == (3, "environment", "file")
    assert (found.invite_only, found.json_logs, found.host) == (True, True, "127.0.0.1")


def test_without_any_option_everything_lies_in_the_data_directory(tmp_path: Path) -> None:
    found = load(environ={})
    assert found.directory == tmp_path / "data" / "volunteer" / "coordinator"
    assert found.database_url == f"sqlite:///{found.directory}/coordinator.sqlite3"
    assert found.blobs_url == str(found.directory / "blobs")
    assert found.admin_token_file.parent == found.directory


def test_the_default_settings_file_and_the_named_one_are_read(tmp_path: Path) -> None:
    usual = tmp_path / "config" / "volunteer" / "coordinator.toml"
    usual.parent.mkdir(parents=True)
    usual.write_text("port = 4")
    assert load(environ={}).port == 4
    assert load(environ={"COORDINATOR_CONFIG": str(settings_file(tmp_path, "port = 5"))}).port == 5


@pytest.mark.parametrize(
    ("file", "environ", "flags", "says"),
    [
        ("prot = 1", {}, {}, 'did you mean "port"?'),
        ("port = 'a'", {}, {}, 'toml: setting "port": expected a whole number, not a text'),
        ("port = 70000", {}, {}, "65535"),
        ("port =", {}, {}, "is not TOML"),
        ("", {"COORDINATOR_PORT": "tcp://10.0.0.1:80"}, {}, "environment"),
        ("", {"COORDINATOR_INVITE_ONYL": "1"}, {}, "COORDINATOR_INVITE_ONLY"),
        ("", {}, {"tls_cert": "a.pem"}, "go together"),
        ("", {}, {"url": "train.example.org"}, "https://train.example.org"),
        *(
            ("", {}, {"url": bad}, "without a path")
            for bad in (
                "https://h/path",
                "https://a b",
                "https://h:99999",
                "https://h:a",
                "https://h?a=1",
                "https://h#a",
                "https://ann:pw@h",
                "https://[::1",
                "https://a'b",
                "http://h.example",
            )
        ),
        ("", {}, {"database": "mysql://x/y"}, "postgresql+asyncpg"),
        ("", {}, {"host": ""}, "127.0.0.1"),
        ("", {}, {"name": "Evil\x1b]0;pwn\x07"}, "name must be one line of printable characters"),
        ("", {"COORDINATOR_CONTACT": "a\nb"}, {}, "contact must be one line of printable"),
        ('inference = "gpu"', {}, {}, "inference must be off, builtin or"),
        ('inference = "http://ann:pw@host/v1"', {}, {}, "inference must be off, builtin or"),
        *(
            (f'inference = "http://{bad}/v1"', {}, {}, "inference must be off, builtin or")
            for bad in ("", "h:99999", "h:0", "h:a", "[::1", "a..b", "a" * 64)
        ),
        ('inference_models = "a=b"', {}, {}, "my-run@40=NAME"),
        ('inference_models = "a@1={version}"', {}, {}, "my-run@40=NAME"),
        ('inference_models = "a@1=b"', {}, {}, "set inference to one"),
        (
            'inference = "http://h/v1"\ninference_models = "a@1=b, a=c-{version}"',
            {},
            {},
            'names the run "a" twice',
        ),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path, file: str, environ: dict[str, str], flags: dict[str, object], says: str
) -> None:
    with pytest.raises(Configuration) as caught:
        load(flags, environ=environ, config=settings_file(tmp_path, file))
    assert says in caught.value.message
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"port": 99_999}, "expected a whole number of at most 65535"),
        ({"log_level": "loud"}, '\'loud\' is not one of "debug", "error", "info", "warning"'),
    ],
)
def test_a_mistake_on_the_command_line_is_one_of_usage(flags: dict[str, object], says: str) -> None:
    (name,) = flags
    with pytest.raises(BadRequest) as caught:
        load(flags, environ={})
    assert caught.value.message == f'the command line: setting "{name}": {says}'
    assert caught.value.exit_code == 2


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Configuration, match="cannot be read"):
        load(environ={}, config=tmp_path / "absent.toml")


def test_what_an_orchestrator_sets_under_our_prefix_does_no_harm() -> None:
    service = {
        "COORDINATOR_SERVICE_HOST": "10.0.0.1",
        "COORDINATOR_SERVICE_PORT_HTTP": "8765",
        "COORDINATOR_PORT_8765_TCP_ADDR": "10.0.0.1",
    }
    assert load(environ=service) == Settings()
    assert not TABLE.ignored(service)
    ours = {"COORDINATOR_PORT": "1", "COORDINATOR_SERVER": "x", "PATH": "x"}
    assert TABLE.ignored(service | ours | {"COORDINATOR_FOO": "5"}) == ["COORDINATOR_FOO"]


def test_every_setting_is_described() -> None:
    rows = TABLE.rows()
    assert [row.name for row in rows] == [
        name for name in Settings.__struct_fields__ if name != "constants"
    ]
    assert all(row.help.endswith((".", "org).")) for row in rows)
    assert all(row.unit for row in rows if row.name.endswith(("_s", "_bytes")))


def test_passwords_are_not_shown() -> None:
    assert (
        without_password("postgresql+asyncpg://ann:geheim@db:5432/v")
        == "postgresql+asyncpg://ann:***@db:5432/v"
    )
    assert without_password("sqlite:////tmp/x.sqlite3") == "sqlite:////tmp/x.sqlite3"


def test_the_documented_table_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    missing = [row.name for row in TABLE.rows() if row.line not in page]
    assert not missing, "paste the lines that row.line gives"

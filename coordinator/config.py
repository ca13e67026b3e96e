"""Settings of the coordinator: one frozen struct. A flag overrides the environment
(`COORDINATOR_*`), which overrides the file, which overrides the default.

The metadata of each field describes the setting for the command line, `docs/settings.md` and the
error messages. No secret is a setting: keys and tokens are private files in the data directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Meta

from shared.errors import BadRequest, Configuration
from shared.network.links import is_loopback, parse_link
from shared.programs.command_hints import options
from shared.proofs.proof_of_work import BITS_MAX
from shared.settings import SettingRow, SettingsTable
from shared.units import GIB, MIB

PREFIX = "COORDINATOR_"

ENGINES = ("off", "builtin")  # values of `inference` that are no address
_ADDRESS = re.compile(r"https?://[^\s@?#]+")
_MODEL = re.compile(r"(?P<run>[^\s=@]+)(@(?P<version>[0-9]{1,9}))?\s*=\s*(?P<name>[^\s=]{1,200})")
_Seconds = {"unit": "s"}
_Bytes = {"unit": "bytes"}


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that are constants in production; tests set others."""

    merge_threads: int = 0  # threads of a merge, besides those that write; 0 = half the cores
    # a merge or an evaluation is taken over if its coordinator is silent for this long
    job_lease_s: float = 15.0
    # most bytes that one volunteer may have uploaded and not yet submitted
    upload_quota_bytes: int = 16 * GIB
    # accounts that a network may make a day without a code; a network is an IPv4 /24 or IPv6 /48
    accounts_per_network: int = 20
    connections_max: int = 32_768
    # time before a stop, with PostgreSQL, in which /ready says no and all requests are served
    drain_s: float = 5.0
    connections_per_address: int = 2048
    headers_s: float = 10.0  # time in which all headers must arrive
    body_window_s: float = 20.0  # a body must arrive at 1 KiB/s in each such window


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this coordinator. Paths are texts as given; properties resolve them."""

    constants: Constants = Constants()
    data_dir: Annotated[str, Meta(description="Data directory (default: the user's).")] = ""
    host: Annotated[
        str, Meta(description="Address to listen on; 0.0.0.0 lets other machines in, with TLS.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(description="TCP port; 0 takes a free one.", ge=0, le=65535)] = 8765
    database: Annotated[
        str,
        Meta(
            description="Database URL, e.g. postgresql+asyncpg://user@host/name (default: SQLite "
            "in the data directory)."
        ),
    ] = ""
    blobs: Annotated[
        str,
        Meta(
            description="Blob store: a directory, or s3://bucket/prefix (default: blobs/ in the "
            "data directory)."
        ),
    ] = ""
    name: Annotated[
        str, Meta(description="Name of this coordinator, shown to volunteers.", max_length=64)
    ] = "coordinator"
    contact: Annotated[str, Meta(description="Contact shown to volunteers.", max_length=255)] = ""
    install: Annotated[
        str,
        Meta(
            description="Line that installs the program, shown to volunteers instead of those for "
            "the wheel that this coordinator serves.",
            max_length=500,
        ),
    ] = ""
    invite_only: Annotated[
        bool, Meta(description="Refuse registrations without an invite code, on loopback too.")
    ] = False
    open: Annotated[
        bool,
        Meta(
            description="Let strangers register without a code: on probation until their work "
            "is proved, and paid then."
        ),
    ] = False
    alert_webhook: Annotated[
        str,
        Meta(
            description="Address that alerts are sent to as JSON by POST; empty = the log only.",
            pattern=r"^(https?://[^\s]+)?$",
            max_length=2000,
        ),
    ] = ""
    alert_stalled_s: Annotated[
        float,
        Meta(
            description="A run with machines at work and no version for this long is an alert; 0 = "
            "never.",
            ge=0,
            extra=_Seconds,
        ),
    ] = 3600.0
    alert_backup_days: Annotated[
        float,
        Meta(
            description="A backup older than this is an alert, and a run of that age without any; "
            "0 = never.",
            ge=0,
            extra={"unit": "days"},
        ),
    ] = 7.0
    proof_of_work_bits: Annotated[
        int,
        Meta(
            description="Proof of work of a registration without a code, with open: 2^bits hashes "
            "on average, about 2 s of one core at 22; 0 = none.",
            ge=0,
            le=BITS_MAX,
        ),
    ] = 22
    url: Annotated[
        str,
        Meta(description="Public address when behind a proxy, e.g. https://train.example.org."),
    ] = ""
    mirrors: Annotated[
        str,
        Meta(
            description="Public copies of the blobs, as URL/ab/abcdef..., separated by commas.",
            pattern=r"^(https?://[^\s,]+(,\s*https?://[^\s,]+)*)?$",
            max_length=2000,
        ),
    ] = ""
    trusted_proxies: Annotated[
        str,
        Meta(
            description="Addresses whose X-Forwarded-For is trusted, separated by commas; only "
            "used with url."
        ),
    ] = "127.0.0.1,::1"
    tls_cert: Annotated[
        str, Meta(description="Certificate file (PEM) to use instead of one made here.")
    ] = ""
    tls_key: Annotated[str, Meta(description="Key file (PEM) of tls_cert.")] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest log level shown."),
    ] = "info"
    json_logs: Annotated[bool, Meta(description="Write log lines as JSON objects.")] = False
    public_page: Annotated[bool, Meta(description="Serve the public web page.")] = True
    metrics: Annotated[
        Literal["token", "public", "off"],
        Meta(
            description="Who may read /metrics: token = whoever has the token in metrics.token of "
            "the data directory (on loopback: everybody); public = everybody; off = nobody."
        ),
    ] = "token"
    space_floor_bytes: Annotated[
        int,
        Meta(
            description="With less free disk than this, nothing new is accepted.",
            ge=0,
            extra=_Bytes,
        ),
    ] = 256 * MIB
    answer_credits_per_day: Annotated[
        float,
        Meta(
            description="Credits one account may spend on answers a day (UTC); 0 = no limit.",
            ge=0,
            le=1e9,
            extra={"unit": "credits"},
        ),
    ] = 0.0
    gift_credits_per_day: Annotated[
        float,
        Meta(
            description="Credits one account may give to others within 24 hours; 0 = none.",
            ge=0,
            le=1e9,
            extra={"unit": "credits"},
        ),
    ] = 10_000.0
    inference: Annotated[
        str,
        Meta(
            description="Engine that answers prompts: builtin, off, or the address of an "
            "OpenAI-compatible server of yours, e.g. http://127.0.0.1:8000/v1.",
            max_length=2000,
        ),
    ] = "builtin"
    inference_models: Annotated[
        str,
        Meta(
            description="Names of models at that address, separated by commas: RUN@40=NAME for one "
            "version of a run, RUN=NAME-{version} for all. Runs not listed are asked for as "
            "RUN@VERSION.",
            max_length=10_000,
        ),
    ] = ""
    inference_device: Annotated[
        Literal["cpu", "cuda", "auto"],
        Meta(description="Device that computes answers here; auto = a GPU where there is one."),
    ] = "cpu"
    inference_threads: Annotated[
        int,
        Meta(description="Threads that compute answers here; 0 = half the cores.", ge=0, le=256),
    ] = 0
    inference_memory_bytes: Annotated[
        int,
        Meta(
            description="Most memory that the process for answers may take: of the GPU where it "
            "computes on one, else of the computer; 0 = half of that memory.",
            ge=0,
            extra=_Bytes,
        ),
    ] = 0
    max_volunteer_leases: Annotated[
        int, Meta(description="Tasks that one volunteer may hold at once, over all machines.", ge=1)
    ] = 64
    rate_worker: Annotated[
        str, Meta(description='Requests that one worker may make; "off" = no limit.')
    ] = "1200/minute"
    rate_ip: Annotated[
        str, Meta(description='Requests that one address may make; "off" = no limit.')
    ] = "12000/minute"
    rate_register: Annotated[
        str,
        Meta(
            description="Registrations that one address may make, with a code or without; "
            '"off" = no limit.'
        ),
    ] = "120/minute"

    @property
    def directory(self) -> Path:
        """Return the data directory, absolute."""
        return Path(self.data_dir).expanduser().absolute() if self.data_dir else default_data_dir()

    @property
    def options(self) -> str:
        """Return the options with which a command in any folder finds this coordinator."""
        return options(
            {
                "data_dir": self.data_dir and self.directory,
                "database": without_password(self.database),
                "blobs": without_password(self.blobs),
            }
        )

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.directory / 'coordinator.sqlite3'}"

    @property
    def drain_s(self) -> float:
        """Return the seconds that a load balancer has to take this server out before it stops."""
        beside_others = self.database.startswith("postgres")
        return self.constants.drain_s if beside_others else 0.0

    @property
    def mirror_urls(self) -> tuple[str, ...]:
        return tuple(url.strip().rstrip("/") for url in self.mirrors.split(",") if url.strip())

    @property
    def blobs_url(self) -> str:
        return self.blobs or str(self.directory / "blobs")

    @property
    def by_invitation(self) -> bool:
        """Return True if registration needs a code: the setting `invite_only` says so, or other
        machines can reach a server that is not `open`.
        """
        beyond = bool(self.url) or not is_loopback(self.host)
        return self.invite_only or (beyond and not self.open)

    @property
    def inference_key_file(self) -> Path:
        """Return the file of the key for the server at `inference`, if that server needs one."""
        return self.directory / "inference.key"

    @property
    def admin_token_file(self) -> Path:
        """Return the file of the secret for commands over HTTP; written at the start, 0600."""
        return self.directory / "admin.token"

    @property
    def metrics_token_file(self) -> Path:
        """Return the file with the token for reading the metrics; written at the start, 0600."""
        return self.directory / "metrics.token"

    @property
    def signing_key_file(self) -> Path:
        """Return the file of the Ed25519 key of manifests; made at the first start, 0600."""
        return self.directory / "signing.key"


def default_data_dir() -> Path:
    """Return the user's data directory for the coordinator."""
    from platformdirs import user_data_path

    return user_data_path("volunteer", appauthor=False) / "coordinator"


def default_config_file() -> Path:
    """Return the file that is read without `--config`, if it exists."""
    from platformdirs import user_config_path

    return user_config_path("volunteer", appauthor=False) / "coordinator.toml"


TABLE = SettingsTable(
    Settings, PREFIX, [PREFIX + name for name in ("CONFIG", "SERVER", "TOKEN_FILE")]
)


def model_names(settings: Settings) -> dict[str, str]:
    """Return the names of `inference_models`, keyed by RUN or RUN@VERSION. Raises Configuration."""
    names: dict[str, str] = {}
    for entry in filter(None, (item.strip() for item in settings.inference_models.split(","))):
        match = _MODEL.fullmatch(entry)
        if match is None or (match["version"] is None) != ("{version}" in match["name"]):
            raise Configuration(
                f"inference_models must look like my-run@40=NAME, or my-run=NAME-{{version}}, "
                f'not "{entry[:80]}"'
            )
        if any(match["run"] == key.partition("@")[0] for key in names):
            raise Configuration(f'inference_models names the run "{match["run"]}" twice')
        names[entry.partition("=")[0].strip()] = match["name"]
    if names and not settings.inference.startswith("http"):
        raise Configuration("inference_models is for an address: set inference to one")
    return names


def _check(settings: Settings) -> None:
    model_names(settings)
    if settings.inference not in ENGINES and not _reachable(settings.inference):
        raise Configuration(
            f"inference must be {', '.join(ENGINES)} or an address like http://HOST:PORT/v1"
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise Configuration("tls_cert and tls_key go together: give both or neither")
    if settings.open and settings.invite_only:
        raise Configuration(
            "open and invite_only contradict each other: open admits strangers, invite_only "
            "refuses them; set only one"
        )
    for setting in ("name", "contact", "install"):
        if not getattr(settings, setting).isprintable():
            raise Configuration(
                f"{setting} must be one line of printable characters: it is shown in terminals"
            )
    if settings.url and not _fits_a_link(settings.url):
        raise Configuration(
            "url must be an address such as https://train.example.org, without a path, and http:// "
            f'on this machine alone, not "{settings.url}"'
        )
    scheme = settings.database.partition(":")[0]
    if settings.database and scheme.split("+")[0] not in ("sqlite", "postgresql"):
        raise Configuration(
            f'database must begin with sqlite:/// or postgresql+asyncpg://, not "{scheme}:"'
        )
    if not settings.host:
        raise Configuration(
            "host must not be empty; 127.0.0.1 is this machine only, 0.0.0.0 all of its addresses"
        )


PLACES = ("data_dir", "database", "blobs")  # settings that name what a command acts on


def load(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Settings:
    """Return the settings in force; a flag of None counts as not given.

    Raises BadRequest for a wrong flag, Configuration naming the source of another mistake.
    """
    return _sourced(flags or {}, os.environ if environ is None else environ, config)[0]


def setting_rows(flags: Mapping[str, object], config: Path | None) -> tuple[SettingRow, ...]:
    """Return every setting in force with its source; a password in an address is hidden. Raises as
    `load` does.
    """
    return tuple(
        msgspec.structs.replace(row, value=without_password(row.value))
        if isinstance(row.value, str)
        else row
        for row in TABLE.rows(*_sourced(flags, os.environ, config))
    )


def _sourced(
    flags: Mapping[str, object], environ: Mapping[str, str], config: Path | None
) -> tuple[Settings, dict[str, str]]:
    for name in PLACES:
        if flags.get(name) == "":  # an unset variable of a script must not name the default place
            option = name.replace("_", "-")
            raise BadRequest(f"--{option} is empty: name a place, or leave the option out")
    path = config or (Path(named) if (named := environ.get(f"{PREFIX}CONFIG")) else None)
    if path is None and default_config_file().is_file():
        path = default_config_file()
    settings, sources = TABLE.load(flags, environ, path)
    _check(settings)
    return settings, sources


def without_password(url: str) -> str:
    """Return a database or blob URL with its password hidden, for display and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))


def _fits_a_link(url: str) -> bool:
    """Return True if a volunteer's program reads this address unchanged from a join link."""
    try:
        return parse_link(url).url == url.rstrip("/").lower()
    except BadRequest:
        return False


def _reachable(address: str) -> bool:
    """Return True if a connection could be tried: a host that has a name and a port that exists."""
    if not _ADDRESS.fullmatch(address):
        return False
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
        return bool(host.encode("idna")) and port != 0
    except ValueError:
        return False

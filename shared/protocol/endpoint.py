"""One endpoint as data: method, path, request, reply, permitted callers, and address."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar
from urllib.parse import quote

import msgspec

from shared.errors import BadRequest
from shared.protocol.limits import API, JSON_BYTES_MAX

Auth = Literal["none", "worker", "admin", "key"]  # "key": an API key of /v1, or a worker's token
R = TypeVar("R")

LISTING_BYTES_MAX = 16 << 20
MANIFEST_BYTES_MAX = 64 << 20  # limit of a dataset's manifest: about 120 bytes a chunk
INTEGER_MAX = 2**31 - 1  # largest integer of a column of versions
KEY_MAX = 2**63 - 1
# Numeric parameters of a path, and the largest values of their columns.
NUMBERS = {"key": KEY_MAX, "task": KEY_MAX, "version": INTEGER_MAX, "contribution": KEY_MAX}
NOTHING = type(None)
BYTES = "application/octet-stream"

_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One query parameter."""

    name: str
    kind: type[int] | type[str]
    help: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Endpoint(Generic[R]):
    """One endpoint, handled in `coordinator.http` or `coordinator.v1`. With `root` its path is
    absolute, otherwise below /api/v1.
    """

    path: str
    summary: str
    # type of the JSON reply; NoneType: 204, no content, unless the endpoint `gives` bytes
    reply: type[R]
    method: Literal["GET", "POST", "PUT", "DELETE"] = "GET"
    request: type[msgspec.Struct] | None = None
    auth: Auth = "worker"
    query: tuple[Parameter, ...] = ()
    headers: tuple[str, ...] = ()  # request headers that are read
    sends: str = ""  # media type of a streamed request body
    gives: str = ""  # media type of a reply that is not JSON
    strict: bool = False  # under the rate limit of registrations
    writes: bool = False  # refused with 507 while the disk is full
    bytes_max: int = JSON_BYTES_MAX  # largest JSON reply
    root: bool = False

    @property
    def full_path(self) -> str:
        return self.path if self.root else API + self.path

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the path's parameters, left to right."""
        return tuple(_PARAMETER.findall(self.path))

    def address(self, args: Mapping[str, str | int]) -> tuple[str, dict[str, str]]:
        """Return the path and the query for these arguments; query parameters that are "" or 0 are
        left out.

        Each argument is quoted as one part of the path, since it may come from the other side.
        Raises BadRequest for a missing or unknown argument.
        """
        names = self.parameters
        parameters = {*names, *(parameter.name for parameter in self.query)}
        if wrong := sorted((set(names) - set(args)) | (set(args) - parameters)):
            raise BadRequest(f"{self.method} {self.path} needs {sorted(parameters)}, not {wrong}")
        path = _PARAMETER.sub(lambda match: quote(str(args[match[1]]), safe=""), self.path)
        return path, {name: str(args[name]) for name in args if name not in names and args[name]}

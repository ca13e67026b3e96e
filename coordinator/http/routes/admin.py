"""The organiser's commands over HTTP: the same functions that the command line calls."""

from __future__ import annotations

import msgspec

from coordinator.admin.registry import COMMANDS
from coordinator.http.request import body_stream, read_body, read_json
from coordinator.http.routes.endpoint import Call, Endpoint, Reply, json_reply
from shared.errors import NotFound
from shared.protocol.limits import API

ADMIN_BYTES_MAX = 16 << 20  # a run file, a class list


async def run_command(call: Call[None]) -> Reply:
    name = call.text("command")
    command = COMMANDS.get(name)
    if command is None or not command.remote:
        raise NotFound(f'there is no command "{name[:64]}" that works on a running server')
    body = await read_body(call.scope, call.receive, ADMIN_BYTES_MAX)
    request = read_json(body or b"{}", command.request)
    return json_reply(await command.run(call.coordinator, request))


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A file that arrived."""

    size: int


async def put_file(call: Call[None]) -> Stored:
    stream = body_stream(call.scope, call.receive)
    size = await call.coordinator.depot.put(call.text("box"), call.text("name"), stream)
    return Stored(size=size)


async def get_file(call: Call[None]) -> Reply:
    size, stream = await call.coordinator.depot.get(call.text("box"), call.text("name"))
    headers = (("content-type", "application/octet-stream"),)
    return Reply(headers=headers, stream=stream, size=size)


ENDPOINTS = (
    Endpoint(
        method="POST",
        path=f"{API}/admin/{{command}}",
        handler=run_command,
        summary="Run a command of the organiser; see the commands of the command line",
        auth="admin",
        reply=dict,
    ),
    Endpoint(
        method="PUT",
        path=f"{API}/admin/files/{{box}}/{{name}}",
        handler=put_file,
        summary="Put a file into a box, for a command to read",
        auth="admin",
        reply=Stored,
        sends="application/octet-stream",
        writes=True,
    ),
    Endpoint(
        method="GET",
        path=f"{API}/admin/files/{{box}}/{{name}}",
        handler=get_file,
        summary="Fetch a file that a command has left in a box",
        auth="admin",
        gives="application/octet-stream",
    ),
)

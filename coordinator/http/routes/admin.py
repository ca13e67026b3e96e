"""The organiser's commands over HTTP: the same functions that the command line calls."""

from __future__ import annotations

from coordinator.admin.registry import COMMANDS
from coordinator.http.request import body_stream, read_body, read_json
from coordinator.http.routes.endpoint import Call, Reply, json_reply
from shared.errors import NotFound
from shared.protocol.endpoints import BYTES, StoredFile

ADMIN_BYTES_MAX = 16 << 20  # a run file, a class list


async def run_command(call: Call[None]) -> Reply:
    name = call.text("command")
    command = COMMANDS.get(name)
    if command is None or not command.remote:
        raise NotFound(f'there is no command "{name[:64]}" that works on a running server')
    body = await read_body(call.scope, call.receive, ADMIN_BYTES_MAX)
    request = read_json(body or b"{}", command.request)
    return json_reply(await command.run(call.coordinator, request))


async def put_file(call: Call[None]) -> StoredFile:
    stream = body_stream(call.scope, call.receive)
    size = await call.coordinator.depot.put(call.text("box"), call.text("name"), stream)
    return StoredFile(size=size)


async def get_file(call: Call[None]) -> Reply:
    size, stream = await call.coordinator.depot.get(call.text("box"), call.text("name"))
    headers = (("content-type", BYTES),)
    return Reply(headers=headers, stream=stream, size=size)

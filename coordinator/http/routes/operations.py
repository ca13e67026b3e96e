"""Organiser's commands and files; identity, health and metrics of the server."""

from __future__ import annotations

from typing import Any

from coordinator.admin import (
    checker_commands,
    datasets,
    people_commands,
    runs,
    tasks,
    upkeep_commands,
)
from coordinator.admin.command import OrganiserCommand
from coordinator.http.routes.endpoint_app import Call, Reply, check_metrics, json_reply
from coordinator.http.routes.metrics import exposition
from coordinator.request_body import body_stream, read_body, read_json
from shared.errors import NotFound, Unavailable
from shared.protocol.accounts import ServerInfo
from shared.protocol.base import Health, StoredFile
from shared.protocol.endpoint import BYTES

COMMANDS: dict[str, OrganiserCommand[Any, Any]] = {
    command.name: command
    for module in (runs, datasets, tasks, people_commands, checker_commands, upkeep_commands)
    for command in vars(module).values()
    if isinstance(command, OrganiserCommand)
}
ADMIN_BYTES_MAX = 16 << 20  # largest request: a run file, a class list


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
    size = await call.coordinator.boxes.put(call.text("box"), call.text("name"), stream)
    return StoredFile(size=size)


async def get_file(call: Call[None]) -> Reply:
    size, stream = await call.coordinator.boxes.get(call.text("box"), call.text("name"))
    headers = (("content-type", BYTES),)
    return Reply(headers=headers, stream=stream, size=size)


async def server(call: Call[None]) -> ServerInfo:
    return await call.coordinator.server.info(call.query("nonce"), call.query("at"))


async def wheel(call: Call[None]) -> Reply:
    wheel_file = await call.coordinator.server.wheel()
    if wheel_file is None or call.text("name") != wheel_file.name:
        raise NotFound("this coordinator has no such wheel; /join says how to install the program")
    return Reply(headers=(("content-type", BYTES),), body=wheel_file.data)


async def health(call: Call[None]) -> Health:
    space = call.coordinator.space
    return Health(status="alive", read_only=space.read_only, why=space.why)


async def ready(call: Call[None]) -> Health:
    coordinator = call.coordinator
    if coordinator.draining.is_set() or coordinator.stopping.is_set():
        raise Unavailable("the coordinator is stopping", retry_after_s=5.0)
    await coordinator.server.ping()
    space = coordinator.space
    if space.broken:  # not for a full disk, since the server can still read from it
        raise Unavailable(space.broken, retry_after_s=30.0)
    return Health(status="ready", read_only=space.read_only, why=space.why)


async def metrics(call: Call[None]) -> Reply:
    check_metrics(call.scope, call.coordinator)
    kind, body = await exposition(call.coordinator)
    return Reply(headers=(("content-type", kind),), body=body)

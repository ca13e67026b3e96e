"""The balancer of `packaging/haproxy.cfg`, before servers of this machine."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

CONFIG = Path(__file__).parents[2] / "packaging" / "haproxy.cfg"
START_S = 60.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def balanced(*ports: int, port: int = 0) -> AsyncIterator[str]:
    """Balance inside the block, at `port` or a free one; yields the address.

    Skips the test where haproxy is not installed.
    """
    program = shutil.which("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    port = port or _free_port()
    text = CONFIG.read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    text = re.sub(r"\n    server .*", "", text)
    text += "".join(f"    server r{n} 127.0.0.1:{each}\n" for n, each in enumerate(ports))
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
        file.write(text)
        file.flush()
        child = subprocess.Popen([program, "-db", "-q", "-f", file.name])
        try:
            async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
                while not await _ready(client, port):
                    assert child.poll() is None
                    await asyncio.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.kill()
            child.wait()


async def _ready(client: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
    except httpx.HTTPError:
        return False

"""Proxy that tunnels to one port of this machine, for any requested address; or refuses."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator


class ConnectProxy:
    """Requests that came, and how they are answered."""

    def __init__(self, target: int, answer: str, password: str) -> None:
        self.asked: list[str] = []
        self._target = target
        self._answer = answer
        self._wanted = base64.b64encode(password.encode()).decode()

    def serve(self, client: socket.socket) -> None:
        """Answer one connection."""
        with client, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(4096) or b"\r\n\r\n"
            text = head.decode("latin-1")
            self.asked.append(text.split("\r\n")[0])
            allowed = f"Basic {self._wanted}" in text or not self._wanted
            if self._answer or not allowed:
                said = self._answer or "407 Proxy Authentication Required"
                client.sendall(f"HTTP/1.1 {said}\r\nContent-Length: 0\r\n\r\n".encode())
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def connect_proxy(
    target: int = 0, *, answer: str = "", password: str = ""
) -> Iterator[tuple[str, ConnectProxy]]:
    """Listen inside the block: `HOST:PORT`, and the proxy."""
    proxy = ConnectProxy(target, answer, password)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=proxy.serve, args=(client,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield "{}:{}".format(*listener.getsockname()), proxy

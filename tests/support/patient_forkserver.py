"""The fork server of `multiprocessing`, which outlives a client that dies in the middle of a request.

Imported in that process before it serves. Without this an end of the client between its connection
and its files ends the server too (EOFError), and every later request of other clients fails.
"""

from __future__ import annotations

import errno
import socket
from multiprocessing import forkserver

_recvfds = vars(forkserver)["reduction"].recvfds


def _recvfds_or_next(connection: socket.socket, size: int) -> list[int]:
    """The files of a request; ECONNABORTED, which the server ignores, where its client is gone."""
    try:
        files: list[int] = _recvfds(connection, size)
    except (EOFError, ConnectionError) as error:
        raise OSError(errno.ECONNABORTED, "the client of the fork server is gone") from error
    return files


vars(forkserver)["reduction"].recvfds = _recvfds_or_next

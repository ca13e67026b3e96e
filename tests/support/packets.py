"""Capture of the packets of a TCP port on the loopback interface, as root on Linux alone."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_PROTOCOL = socket.htons(3)
FRAME_BYTES_MAX = 1 << 17  # the interface carries frames of 64 KiB
KERNEL_BYTES = 64 << 20
HEADER = 14  # of Ethernet; the loopback interface has it too
LOOK_S = 0.2


class Packets:
    """Packets to and from a port, whole, in the order of their arrival."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.data = bytearray()
        self.count = 0
        self.refusal = ""  # reason why nothing is captured

    def add(self, frame: bytes) -> None:
        """Keep a frame if it is of the port."""
        if len(frame) <= HEADER or frame[HEADER] >> 4 != 4:
            return
        ports = HEADER + 4 * (frame[HEADER] & 15)
        if len(frame) >= ports + 4 and self.port in struct.unpack_from("!HH", frame, ports):
            self.data += frame
            self.count += 1


@contextmanager
def captured(port: int) -> Iterator[Packets]:
    """Capture the packets of a port within the block; without the right to, say so and go on."""
    packets = Packets(port)
    try:
        listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, EVERY_PROTOCOL)
    except (PermissionError, AttributeError) as error:
        packets.refusal = f"no packets are captured: {error}"
        print(packets.refusal)
        yield packets
        return
    over = threading.Event()

    def capture() -> None:
        while not over.is_set():
            try:
                packets.add(listener.recv(FRAME_BYTES_MAX))
            except TimeoutError:
                continue

    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        listener.bind(("lo", 0))
        listener.settimeout(LOOK_S)
        thread = threading.Thread(target=capture, daemon=True)
        thread.start()
        try:
            yield packets
        finally:
            over.set()
            thread.join()

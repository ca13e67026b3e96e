"""Limits of sizes, and times of a lease."""

from __future__ import annotations

from unicodedata import category

from shared.text import is_undrawn

API = "/api/v1"

# Limits. Settings may only tighten them.
JSON_BYTES_MAX = 1 << 20
JSON_DEPTH_MAX = 32
HEADER_BYTES_MAX = 16 << 10
NICKNAME_MIN, NICKNAME_MAX = 2, 24
_NICKNAME_SIGNS = " -_.'"
_NICKNAME_KINDS = ("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd")  # letters, accents, digits
DIRECT_BYTES = 1 << 20  # smaller blobs are downloaded without asking for the store's address
MIRROR_PIECE_BYTES = 16 << 20  # bytes from a mirror that are checked together, by their hash
UPLOAD_PIECE_BYTES = 256 << 20  # most bytes of one PUT of a resumable upload
UPLOAD_BYTES_MAX = 64 << 30
LONG_POLL_S_MAX = 60.0
PARTS_MAX = 1024
TRIES_MAX = 64  # most repetitions of one part
NEWS_MAX = 50  # most verdicts in one reply
AUDIT_BYTES = 2048  # result of an audit: 256 sums of parameters and 256 of buffers, float32

# Memory for training, in bytes for each parameter: weights, gradients, two Adam moments, base,
# activations; on a CPU also snapshots and results (28 measured with a GPT of 10.8 M parameters).
DEVICE_BYTES, CPU_BYTES = 18, 30
PROCESS_BYTES = 350_000_000  # a worker's process before any model (measured: 299 to 370 MB)

# Times of a lease.
HEARTBEAT_S = 30.0
RENEW_S = 90.0
BODY_RATE_MIN = 1024  # least rate of a body in bytes a second, averaged over a window


def fits_nickname(char: str) -> bool:
    """Return True if a nickname may hold this character."""
    letter = category(char) in _NICKNAME_KINDS and not is_undrawn(char)
    return letter or char in _NICKNAME_SIGNS


def memory_on(device: str, memory_bytes: int) -> int:
    """Return the bytes that a run needs on a device ("cpu", "cuda:0"); `memory_bytes` is that of
    `RunInfo`.
    """
    return memory_bytes * CPU_BYTES // DEVICE_BYTES if device == "cpu" else memory_bytes


def holds(
    device: str, device_bytes: int, host_bytes: int, *, memory_bytes: int, streamed_bytes: int
) -> bool:
    """Return True if a device has room for a task of a run: for the state of the run's model, or,
    if the host keeps the state in memory, for one block of the model at a time. `memory_bytes` and
    `streamed_bytes` are those of `RunInfo`; `device_bytes` = 0 is unknown.
    """
    if not device_bytes or memory_on(device, memory_bytes) <= device_bytes:
        return True
    return 0 < streamed_bytes <= device_bytes and memory_on("cpu", memory_bytes) <= host_bytes


def process_on(device: str, memory_bytes: int) -> int:
    """Return the bytes that a run needs on a device; on a CPU the worker's process counts too."""
    return memory_on(device, memory_bytes) + (PROCESS_BYTES if device == "cpu" else 0)

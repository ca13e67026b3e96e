"""Proof of work: a puzzle that costs the sender seconds and the server one hash.

A solution is a nonce such that SHA-256(challenge || nonce) begins with `bits` zero bits. The
challenge carries its own expiry and the server's MAC, so the server stores nothing until a solution
arrives; the caller must accept each challenge only once.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable
from hashlib import sha256

from shared.errors import BadRequest

BITS_MAX = 32  # more bits would take hours
HASH_S = 0.55e-6  # seconds a hash takes, measured: 2.3 s for 2^22
REPORT = 1 << 16  # hashes between two reports of progress: some 35 ms
NONCE_MAX = 2**64
MAC_CHARS = 32


def challenge(secret: bytes, subject: str, expires_at: float) -> str:
    """Return a challenge for a subject (such as a new account): its expiry and a MAC over both."""
    until = f"{expires_at:.0f}"
    return f"{until}.{_mac(secret, subject, until)}"


def check(secret: bytes, subject: str, puzzle: str, now: float) -> None:
    """Raise BadRequest unless the challenge was made here for this subject, and has not expired."""
    until, _, mac = puzzle.partition(".")
    if not hmac.compare_digest(mac.encode(), _mac(secret, subject, until).encode()):
        raise BadRequest("this challenge was not made here; ask for another one")
    if float(until) < now:
        raise BadRequest("the challenge has expired; ask for another one")


def solves(puzzle: str, nonce: int, bits: int) -> bool:
    """Return True if the nonce solves the challenge at this difficulty."""
    if not 0 <= nonce < NONCE_MAX:
        return False
    hashed = sha256(puzzle.encode() + nonce.to_bytes(8, "big")).digest()
    return int.from_bytes(hashed, "big") >> (256 - bits) == 0


def solve(puzzle: str, bits: int, progress: Callable[[int], bool]) -> int | None:
    """Return the smallest nonce that solves a challenge, after 2^bits hashes on average.

    After every REPORT hashes `progress` gets their number so far; the search ends with None when
    it returns False. Raises BadRequest for a difficulty that no honest server asks for.
    """
    if not 0 <= bits <= BITS_MAX:
        raise BadRequest(f"a proof of work has 0 to {BITS_MAX} bits here, not {bits}")
    prefix, nonce = sha256(puzzle.encode()), 0
    limit = 1 << (256 - bits)
    while True:
        for value in range(nonce, nonce + REPORT):
            hasher = prefix.copy()
            hasher.update(value.to_bytes(8, "big"))
            if int.from_bytes(hasher.digest(), "big") < limit:
                return value
        nonce += REPORT
        if not progress(nonce):
            return None


def solved_probability(hashes: int, bits: int) -> float:
    """Return the probability that this number of hashes finds a nonce; shown as progress."""
    return 1.0 - math.exp(-hashes / 2.0**bits)


def search_time_text(bits: int) -> str:
    """Return the average time of the search for a nonce on one core, as a text such as "2 s"."""
    seconds = 2.0**bits * HASH_S
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _mac(secret: bytes, subject: str, until: str) -> str:
    payload = f"proof-of-work\n{subject}\n{until}".encode()
    return hmac.new(secret, payload, sha256).hexdigest()[:MAC_CHARS]

"""Proof of work of registrations without a code: made, verified and used once.

A challenge carries its expiry and the server's MAC, so that the server need not store it before it
is used. A challenge is valid for one account only, so that using it twice makes no second account.
Used challenges are still stored until they expire, in a bounded number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Self

from shared.errors import BadRequest, Forbidden
from shared.proofs import proof_of_work
from shared.protocol.accounts import Challenge, RegisterRequest

if TYPE_CHECKING:
    from coordinator.platform import Platform
    from shared.clock import Clock

# least validity of a challenge; a hard challenge is valid for longer, so that a slow machine can
# solve it
CHALLENGE_S = 600.0
SLOW_HASH_S = 16e-6  # seconds of one hash on a slow machine: 30 times the measured time
USED_MAX = 100_000
_NONCE = re.compile(r"[0-9a-f]{1,16}")


class Challenges:
    """Challenges of one server. `bits` is their difficulty; 0 turns them off."""

    def __init__(self, secret: bytes, bits: int, clock: Clock) -> None:
        self._secret = secret
        self._clock = clock
        # used challenge -> when it can be forgotten, the oldest use first
        self._used: dict[str, float] = {}
        self.bits = bits

    @classmethod
    def of(cls, on: Platform) -> Self:
        """Return the challenges of a server; replicas with one key accept each other's."""
        secret = on.key.secret("secret of proofs of work")
        return cls(secret, on.settings.proof_of_work_bits if on.settings.open else 0, on.clock)

    def challenge(self, volunteer_id: str) -> Challenge:
        """Return a challenge for an account that is to be made."""
        until = self._clock.now() + max(CHALLENGE_S, 2.0**self.bits * SLOW_HASH_S)
        text = proof_of_work.challenge(self._secret, volunteer_id, until)
        return Challenge(challenge=text, bits=self.bits, expires_at=until)

    def check(self, request: RegisterRequest) -> None:
        """Check the proof of a registration, without the database.

        Raises Forbidden for a request without a challenge, BadRequest for a proof that is wrong,
        expired or used.
        """
        if not self.bits:
            return
        if not request.challenge:
            raise Forbidden(
                "this coordinator is open to everybody and asks newcomers for a proof of work, "
                "which this request lacks: `volunteer update`, or join by an invite"
            )
        now, challenge = self._clock.now(), request.challenge
        proof_of_work.check(self._secret, request.volunteer_id, challenge, now)
        if not _NONCE.fullmatch(request.nonce) or not proof_of_work.solves(
            challenge, int(request.nonce, 16), self.bits
        ):
            raise BadRequest("the nonce does not solve the challenge; ask for another one")
        if challenge in self._used:
            raise BadRequest("this challenge was used already; ask for another one")

    def use(self, request: RegisterRequest) -> None:
        """Mark the challenge of a registration as used."""
        if not (self.bits and request.challenge):
            return
        now = self._clock.now()
        while self._used:
            oldest = next(iter(self._used))
            if len(self._used) < USED_MAX and self._used[oldest] >= now:
                break
            del self._used[oldest]
        self._used[request.challenge] = self.challenge("").expires_at

"""Leases of this worker on disk, so that a restarted worker resumes them.

The snapshot of a lease's unfinished training lies beside it. The id of each device's running claim
is stored too: after a lost reply the claim is repeated with the same id and returns the same lease.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from shared.errors import Configuration
from shared.files.deletions import delete_file
from shared.files.disk_writes import PARTIAL_SUFFIX
from shared.protocol.leases import BeginReply, Lease
from volunteer.files import private_directory, read_record, set_aside, write_record

AUDIT_SUFFIX = ".audit"  # suffix of the update of an audit, of which only sums are kept


class HeldLease(msgspec.Struct, frozen=True, kw_only=True):
    """Lease of this worker as it is stored; `begun` is the reply that bound its base version."""

    lease: Lease
    device: str
    claim_id: str
    begun: BeginReply | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.lease.task, self.lease.attempt


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Claim that has no lease yet."""

    claim_id: str
    device: str


class Leases:
    """Directory of leases. Its calls block on the disk for a short time."""

    def __init__(self, root: Path) -> None:
        self.root = private_directory(root)
        self._sweep()

    def stored(self) -> tuple[HeldLease, ...]:
        """Return the leases of an earlier process, by task; damaged records are set aside."""
        leases = []
        for path in sorted(self.root.glob("*-*.json")):
            try:
                lease = read_record(path, HeldLease)
            except Configuration:
                set_aside(path)
                continue
            if lease is not None:
                leases.append(lease)
        return tuple(sorted(leases, key=lambda lease: lease.key))

    def keep(self, lease: HeldLease) -> None:
        write_record(self._path(lease.lease, ".json"), lease)

    def drop(self, lease: Lease) -> None:
        delete_file(self._path(lease, ".json"), "settled")
        delete_file(self.snapshot(lease), "settled")

    def snapshot(self, lease: Lease) -> Path:
        return self._path(lease, ".safetensors")

    def claim_id(self, device: str) -> str:
        """Return the id of a device's running claim. If no claim is running, store a new claim."""
        path = self._claim(device)
        try:
            claim = read_record(path, Claim)
        except Configuration:
            claim = None
        if claim is None:
            claim = Claim(claim_id=secrets.token_hex(16), device=device)
            write_record(path, claim)
        return claim.claim_id

    def keep_claimed(self, lease: HeldLease) -> None:
        """Store a lease and end the claim that returned it: the next claim gets a new id."""
        self.keep(lease)
        self.forget_claim(lease.device)

    def forget_answered_claims(self, leases: tuple[HeldLease, ...]) -> None:
        """Drop claims whose lease was stored just before the process died."""
        answered = {lease.claim_id for lease in leases}
        for path in self.root.glob("claim.*.json"):
            try:
                claim = read_record(path, Claim)
            except Configuration:
                claim = None
            if claim is None or claim.claim_id in answered:
                delete_file(path, "settled")

    def forget_claim(self, device: str) -> None:
        delete_file(self._claim(device), "settled")

    def _sweep(self) -> None:
        """Delete incomplete files, and snapshots without a lease, of ended processes."""
        for path in self.root.iterdir():
            orphan = path.suffix == ".safetensors" and not path.with_suffix(".json").exists()
            if orphan or path.suffix in (PARTIAL_SUFFIX, AUDIT_SUFFIX):
                delete_file(path, "scratch")

    def _claim(self, device: str) -> Path:
        return self.root / f"claim.{device.replace(':', '_')}.json"

    def _path(self, lease: Lease, suffix: str) -> Path:
        return self.root / f"{lease.task}-{lease.attempt}{suffix}"

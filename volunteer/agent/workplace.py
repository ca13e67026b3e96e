"""Workplace of the agent's loops: one coordinator, the files of its profile, its devices."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from shared.clock import Clock, ServerClock
from shared.protocol.accounts import Device
from volunteer.account.profile_directory import Home, Identity
from volunteer.agent.held_leases import HeldLeases
from volunteer.agent.lifecycle import Lifecycle
from volunteer.control.event_bus import EventBus
from volunteer.net.api import Api
from volunteer.net.transfers import Transfers
from volunteer.net.weights import Weights
from volunteer.storage.blob_cache import Cache
from volunteer.storage.leases import Leases
from volunteer.storage.outbox import Outbox
from volunteer.storage.own_data import OwnData
from volunteer.storage.receipts import ReceiptBook
from volunteer.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCoordinator:
    """One coordinator: the account there, its endpoints, its files."""

    identity: Identity
    api: Api
    transfers: Transfers
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Files of one account on this machine."""

    home: Home
    cache: Cache
    outbox: Outbox
    leases: Leases
    receipts: ReceiptBook
    own_data: OwnData


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Clock and randomness of all waits."""

    clock: Clock
    rng: random.Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Objects that all loops of an agent share."""

    remote: RemoteCoordinator
    store: Store
    bus: EventBus
    life: Lifecycle
    held: HeldLeases
    timing: Timing
    server_clock: ServerClock


@dataclass(frozen=True, slots=True, kw_only=True)
class LentDevice:
    """Working device, its thread, its speed, and the bytes that a task may use there."""

    device: Device
    trainer: Trainer
    speed: Callable[[], float]  # current operations a second in training; 0 is unknown
    memory_bytes: int
    host_bytes: int = 0  # memory of the host that a task may use beside the device's own

    @property
    def id(self) -> str:
        return self.device.id

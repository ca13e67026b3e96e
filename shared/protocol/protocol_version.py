"""Version of the protocol, and its comparison: where a program and a coordinator cannot work
together, one sentence names the older of the two.

A program names its version when it registers and with every request of a worker, so that a program
or a coordinator that is exchanged later is compared again.
"""

from __future__ import annotations

import re

from shared.errors import BadRequest, Configuration, UpgradeRequired
from shared.sentences import Sentence

PROTOCOL = 1  # version of this code
PROTOCOL_MIN = 1  # oldest version that this code works with
HEADER = "X-Protocol"  # header of a worker's requests: the version of its program
_VERSION = re.compile(r"[0-9]{1,9}")


def check_client(version: int) -> None:
    """Raise UpgradeRequired for a program that is too old for this coordinator."""
    if version < PROTOCOL_MIN:
        raise UpgradeRequired


def check_header(text: str) -> None:
    """Compare the version in a header; "" stands for a client that names no version. Raises
    UpgradeRequired, BadRequest.
    """
    if not text:
        return
    if not _VERSION.fullmatch(text):
        raise BadRequest(f"the header {HEADER} is the version of the protocol, a whole number")
    check_client(int(text))


def check_server(version: int, version_min: int) -> None:
    """Raise UpgradeRequired for a coordinator of a `version` that serves no program as old as this
    one, Configuration for a coordinator that is too old itself.
    """
    if version_min > PROTOCOL:
        raise UpgradeRequired(
            Sentence(
                "this program is too old for the coordinator (protocol {protocol}, it needs "
                "{protocol_min}): `volunteer update`",
                protocol_min=version_min,
                protocol=PROTOCOL,
            )
        )
    if version < PROTOCOL_MIN:
        raise Configuration(
            Sentence(
                "the coordinator is too old for this program (protocol {protocol}, it needs "
                "{protocol_min}): ask the organiser to update it",
                protocol_min=PROTOCOL_MIN,
                protocol=version,
            )
        )

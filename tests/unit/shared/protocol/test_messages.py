"""The wire, pinned: one example of every message and the JSON that the other side sees.

A golden line that changes is a change of the protocol. When it is meant, write the file anew:

    python -m tests.unit.shared.protocol.test_messages
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shared.protocol import (
    accounts,
    base,
    contributions,
    heartbeat,
    inference,
    leases,
    listings,
    members,
    transparency,
    versions,
)
from shared.protocol.base import Message
from tests.support.sources import ROOT

PARTS = (
    accounts,
    base,
    contributions,
    heartbeat,
    inference,
    leases,
    listings,
    members,
    transparency,
    versions,
)
GOLDEN = ROOT / "tests" / "golden" / "messages.json"


def messages() -> dict[str, type[Message]]:
    """Every message that the two sides exchange, by name."""
    found = {n: m for part in PARTS for n, m in vars(part).items()}
    return {
        name: message
        for name, message in sorted(found.items())
        if isinstance(message, type) and issubclass(message, Message)
    }


def example(described: msgspec.inspect.Type) -> Any:
    """A value of a type as it looks in JSON: every field filled in, every list with one item."""
    match described:
        case msgspec.inspect.StructType(fields=fields):
            return {field.encode_name: example(field.type) for field in fields}
        case msgspec.inspect.UnionType(types=types):
            return example(next(t for t in types if not isinstance(t, msgspec.inspect.NoneType)))
        case (
            msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item)
        ):
            return [example(item)]
        case msgspec.inspect.TupleType(item_types=items):
            return [example(item) for item in items]
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {example(key): example(value)}
        case msgspec.inspect.LiteralType(values=values):
            return values[0]
        case msgspec.inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return 7
        case msgspec.inspect.FloatType(lt=lt, le=le):
            return 2.5 if min(lt or 9.0, le or 9.0) > 2.5 else 0.5
        case msgspec.inspect.BytesType():
            return "Ynl0ZXM="
        case msgspec.inspect.RawType() | msgspec.inspect.AnyType():
            return {"any": "JSON"}
        case msgspec.inspect.CustomType(cls=cls) if cls is object:
            return {"any": "JSON"}
    assert isinstance(described, msgspec.inspect.StrType), described
    return "text"


def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return loaded


def test_every_message_is_pinned() -> None:
    assert sorted(golden()) == sorted(messages())


@pytest.mark.parametrize("name", sorted(messages()))
def test_a_message_is_the_json_that_the_other_side_expects(name: str) -> None:
    pinned = golden()[name]
    message = msgspec.json.decode(json.dumps(pinned), type=messages()[name])
    assert json.loads(msgspec.json.encode(message)) == pinned
    assert example(msgspec.inspect.type_info(messages()[name])) == pinned


@pytest.mark.parametrize("name", sorted(messages()))
def test_what_a_newer_side_adds_is_ignored(name: str) -> None:
    pinned = golden()[name]
    newer = json.dumps(pinned | {"added_in_a_newer_version": [1]})
    decode = msgspec.json.Decoder(messages()[name]).decode
    if name == "SubmitRequest":  # a task is what the coordinator published, and nothing more
        with pytest.raises(msgspec.ValidationError, match="unknown field"):
            decode(newer)
        return
    assert decode(newer) == decode(json.dumps(pinned))


if __name__ == "__main__":
    written = {name: example(msgspec.inspect.type_info(m)) for name, m in messages().items()}
    GOLDEN.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")

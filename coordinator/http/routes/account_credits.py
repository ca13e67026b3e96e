"""API keys, usage and gifts of a volunteer; receipts, and the record that they are proved by."""

from __future__ import annotations

from coordinator.http.routes.endpoint_app import Call
from shared.protocol.inference import Given, GiveRequest, KeyInfo, KeyRequest, NewKey, UsageRow
from shared.protocol.transparency import SignedHead, SignedReceipt, TreeProof


async def keys(call: Call[None]) -> tuple[KeyInfo, ...]:
    return await call.coordinator.api_keys.listing(call.principal)


async def create_key(call: Call[KeyRequest]) -> NewKey:
    return await call.coordinator.api_keys.create(call.principal, call.body)


async def revoke_key(call: Call[None]) -> KeyInfo:
    return await call.coordinator.api_keys.revoke(call.principal, call.number("key"))


async def usage(call: Call[None]) -> tuple[UsageRow, ...]:
    return await call.coordinator.api_keys.usage(call.principal, key=call.query_number("key"))


async def give(call: Call[GiveRequest]) -> Given:
    return await call.coordinator.api_keys.give(call.principal, call.body)


async def receipts(call: Call[None]) -> tuple[SignedReceipt, ...]:
    transparency = call.coordinator.transparency
    return await transparency.receipts(call.principal, call.query_number("cursor"))


async def head(call: Call[None]) -> SignedHead:
    return await call.coordinator.transparency.head()


async def consistency(call: Call[None]) -> TreeProof:
    transparency = call.coordinator.transparency
    return await transparency.consistency(call.query_number("old"), call.query_number("new"))

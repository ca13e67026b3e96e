"""Addresses that one person gets many of count once."""

from __future__ import annotations

import pytest

from coordinator.rules.networks import UNKNOWN, address_key, network


@pytest.mark.parametrize(
    ("address", "key", "net"),
    [
        ("8.8.4.4", "8.8.4.4", "8.8.4.0/24"),
        ("::ffff:8.8.4.4", "8.8.4.4", "8.8.4.0/24"),
        ("2606:4700:10:20:1:2:3:4", "2606:4700:10:20::/64", "2606:4700:10::/48"),
        ("192.168.1.7", "192.168.1.7", UNKNOWN),
        ("127.0.0.1", "127.0.0.1", UNKNOWN),
        ("::1", "::/64", UNKNOWN),
        ("fe80::1%eth0", "fe80::/64", UNKNOWN),
        ("", "", UNKNOWN),
        ("not an address", "not an address", UNKNOWN),
    ],
)
def test_an_address_is_counted_by(address: str, key: str, net: str) -> None:
    assert (address_key(address), network(address)) == (key, net)

"""The list of endpoints: addresses that a client makes of it, and queries that a front end may
send.
"""

from __future__ import annotations

from collections import Counter

import pytest

from shared.errors import BadRequest
from shared.protocol import endpoints
from shared.protocol.endpoints import ENDPOINTS, QUERIES


def test_an_address_quotes_names_and_leaves_out_what_is_empty() -> None:
    path, query = endpoints.VERSIONS.address({"run": "a/b ?", "cursor": "7"})
    assert (path, query) == ("/runs/a%2Fb%20%3F/versions", {"cursor": "7"})
    assert endpoints.VERSION.address({"run": "r", "version": 0}) == ("/runs/r/versions/0", {})
    assert endpoints.LEADERBOARD.address({"run": "", "days": 0}) == ("/leaderboard", {})
    assert endpoints.LEADERBOARD.address({"days": 7})[1] == {"days": "7"}


@pytest.mark.parametrize("args", [{}, {"pun": "r"}, {"run": "r", "days": 1}])
def test_an_address_names_wrong_arguments(args: dict[str, str | int]) -> None:
    with pytest.raises(BadRequest, match=r"GET /runs/\{run\}/loss needs \['run'\]"):
        endpoints.LOSS.address(args)


def test_every_endpoint_is_listed_once() -> None:
    places = Counter((endpoint.method, endpoint.full_path) for endpoint in ENDPOINTS)
    assert set(places.values()) == {1}


def test_queries_only_read() -> None:
    assert endpoints.LOSS is QUERIES["/runs/{run}/loss"]
    assert {endpoint.method for endpoint in QUERIES.values()} == {"GET"}
    assert not [path for path in QUERIES if "admin" in path or path == "/blobs/{sha256}"]

"""Exit 0 if the coordinator of this container answers on /health, without TLS or over it."""

from __future__ import annotations

import http.client
import os
import ssl
import sys

HOST = "127.0.0.1"
TIMEOUT_S = 4.0


def healthy(port: int) -> bool:
    """Whether /health says 200. The certificate is the coordinator's own and not checked: it is us."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tries: list[http.client.HTTPConnection] = [
        http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S / 2),
        http.client.HTTPSConnection(HOST, port, timeout=TIMEOUT_S / 2, context=context),
    ]
    for connection in tries:
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False


if __name__ == "__main__":
    sys.exit(0 if healthy(int(os.environ.get("COORDINATOR_PORT", "8765"))) else 1)

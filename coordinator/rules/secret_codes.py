"""Codes and secrets: making, parsing and comparing them. Pure; the database stores only SHA-256.

An **invite** lets a volunteer register, a **link code** adds a machine to an account. Both use
Crockford's base 32 in groups of four, so that people can read them aloud and type them: case,
blanks and dashes do not matter, O is 0, I and L are 1.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable

from shared.errors import BadRequest, Unauthorized

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LINK_CHARS = 8  # 40 bits, valid for ten minutes and behind a rate limit
INVITE_CHARS = 16  # 80 bits, since an invite may be in a chat for weeks
CODE_CHARS_MAX = 64  # longest code that a person may type

WRONG_SECRET = (
    "unknown worker or wrong secret: ask your organiser for a link of your own (coordinator "
    "volunteer reissue NAME) "
    "and join with that"
)
REVOKED = "this machine's secret was withdrawn: join again with a code from your organiser"
BANNED = "the organiser has banned this account; write to them if you think this is a mistake"

SECRET_CHARS_MIN, SECRET_CHARS_MAX = 32, 256
_ID = re.compile(r"[A-Za-z0-9_-]{16,64}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{32,256}")
_READ_AS = str.maketrans("OIL", "011")

Random = Callable[[int], int]  # returns a random number below its argument


def new_code(chars: int, random: Random = secrets.randbelow) -> str:
    """Return a new code in groups of four."""
    text = "".join(ALPHABET[random(len(ALPHABET))] for _ in range(chars))
    return "-".join(text[start : start + 4] for start in range(0, chars, 4))


def derived(secret: bytes, chars: int) -> str:
    """Return the code of `chars` letters (at most 32) that derives from a secret of 32 bytes."""
    letters = iter(secret)
    return new_code(chars, lambda below: next(letters) % below)


def normal(typed: str) -> str:
    """Return the normal form of a typed code. Raises BadRequest for a malformed code."""
    text = "".join(c for c in typed[:CODE_CHARS_MAX].upper() if not c.isspace() and c not in "-_.")
    text = text.translate(_READ_AS)
    if len(typed) > CODE_CHARS_MAX or not text or any(char not in ALPHABET for char in text):
        raise BadRequest("this is not a code: a code looks like 7K3M-Q2XP")
    return text


def code_hash(typed: str) -> str:
    """Return the hash under which a typed code is stored. Raises BadRequest for a malformed
    code.
    """
    return hashlib.sha256(normal(typed).encode()).hexdigest()


def secret_hash(secret: str) -> str:
    """Return the hash under which a worker's secret is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def same(one: str, other: str) -> bool:
    """Compare two hashes in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def check_id(name: str, value: str) -> str:
    """Return an id made by a client. Raises BadRequest for an invalid one."""
    if not _ID.fullmatch(value):
        raise BadRequest(f"{name} must be 16 to 64 letters, digits, '-' or '_'")
    return value


def check_secret(secret: str) -> str:
    """Return a secret that is long and varied enough. Raises BadRequest for a weaker secret."""
    if not _SECRET.fullmatch(secret) or len(set(secret)) < 8:
        raise BadRequest(
            f"the secret must be {SECRET_CHARS_MIN} to {SECRET_CHARS_MAX} random letters, "
            "digits, '-' or '_'"
        )
    return secret


def check_credentials(worker_id: str, secret: str) -> None:
    """Check the form of a worker's credentials before any look-up. Raises Unauthorized."""
    if not _ID.fullmatch(worker_id) or not _SECRET.fullmatch(secret):
        raise Unauthorized("these credentials are damaged: join again with your link")

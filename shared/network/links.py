"""Join links: the address of a coordinator, its fingerprint, and a code.

    https://host:port/join#key=FINGERPRINT+pin=SHA256+code=CODE      printed form, which also opens in a browser
    volunteer://host:port/#key=FINGERPRINT&pin=SHA256&code=CODE      form for a registered scheme

`key` is the fingerprint of the key that signs manifests, `pin` the SHA-256 of the TLS certificate
in hex (only if the coordinator made the certificate itself), `code` an invite or link code. All
three stand behind the "#": browsers never send that part, so no proxy or log sees it. The printed
separator is "+", which needs no quotes in a shell; "&", ";" and "/" are read as well.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

import msgspec

from shared.errors import BadRequest
from shared.sentences import Sentence

LINK_CHARS_MAX = 2048
HOSTS_KEPT = 64  # cached results of `is_loopback`, which a local server calls for each request
NO_LINK = Sentence("this is not a join link; copy it whole from your organiser")
_QUOTES = "'\"`<>()‘’“”„‚«»‹›"  # signs around a link in a sentence or a command
_COMMAND = re.compile(r"^\s*(?:\$\s*)?volunteer\s+join\s+")
_QUOTED_LINE = re.compile(r"[\r\n]+[ \t]*(?:[>|]+[ \t]*)+")  # line break, marks of a quoted line
# Line break that a mail adds, with its "=" before it; the "=" after a name belongs to the link.
_SOFT_BREAK = re.compile(r"(?<!key)(?<!pin)(?<!code)=\r?\n")
_OPTION = re.compile(r"\s--[a-z][\w-]*")
_ONE_SLASH = re.compile(r"^(https?|volunteer):/(?=[^/])")
# characters without a meaning in a link: white space, invisible ones, drawn borders
_UNSEEN = re.compile(r"[\s\u00ad\u200b-\u200d\u2060\u2500-\u259f\ufeff]+")
_SEPARATORS = re.compile(r"[+&;/]")
_PIN = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[A-Za-z0-9_:.~-]{1,256}")


class JoinLink(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a join link; "" = not in the link. `url` is `https://host:port`, without a path."""

    url: str
    fingerprint: str = ""
    tls_pin: str = ""  # SHA-256 of the certificate's DER, 64 hex digits
    code: str = ""


@lru_cache(maxsize=HOSTS_KEPT)
def is_loopback(host: str) -> bool:
    """Return True if `host` can only mean this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _origin(text: str) -> tuple[str, str, str]:
    """Return scheme, `host[:port]` and fragment. Raises BadRequest."""
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname or ""
    except ValueError as error:
        raise BadRequest(NO_LINK) from error
    if parts.scheme not in ("https", "http", "volunteer") or not host:
        raise BadRequest(
            Sentence(
                "a join link begins with https:// (or volunteer://) and an address; copy it "
                "whole from your organiser"
            )
        )
    if parts.username is not None or parts.password is not None:
        raise BadRequest(
            Sentence("a join link never carries a user name or password before the address")
        )
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,253}", host):
        raise BadRequest(Sentence('"{host}" is not an address', host=host))
    netloc = f"[{host}]" if ":" in host else host
    return parts.scheme, netloc if port is None else f"{netloc}:{port}", parts.fragment


def _fields(fragment: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in filter(None, _SEPARATORS.split(fragment)):
        name, _, value = item.partition("=")
        value = unquote(value)
        if name in ("key", "pin", "code"):
            if not _PART.fullmatch(value):
                raise BadRequest(
                    Sentence(
                        'the part "{name}" of the join link is damaged; copy the link whole',
                        name=name,
                    )
                )
            values[name] = value
    return values


def tidy_link(text: str) -> str:
    """Return the link in a pasted text: without the command before it, the quotes around it, white
    space, line breaks, and the marks of a mail that wraps or quotes lines.
    """
    text = _COMMAND.sub("", text[: 2 * LINK_CHARS_MAX])
    text = _SOFT_BREAK.sub("", _QUOTED_LINE.sub("\n", text))
    return _UNSEEN.sub("", text).lstrip(_QUOTES).rstrip(_QUOTES + ".,!?")


def parse_link(text: str) -> JoinLink:
    """Read a join link or a bare address from a pasted text. Raises BadRequest."""
    original, text = " ".join(text.split()), tidy_link(text)
    if not text or len(text) > LINK_CHARS_MAX or not text.isprintable():
        raise BadRequest(NO_LINK)
    if option := _OPTION.search(original):
        raise BadRequest(
            Sentence(
                'the quotes around the link also hold "{option}": close them before it',
                option=option[0],
            )
        )
    text = _ONE_SLASH.sub(r"\1://", text)
    if "://" not in text:
        bare = urlsplit(f"//{text}")
        local = is_loopback(bare.hostname or "")
        if not (local or "." in bare.netloc or ":" in bare.netloc):
            raise BadRequest(
                Sentence(
                    '"{text}" is not a link: a join link begins with https:// and comes from your '
                    "organiser",
                    text=original,
                )
            )
        text = f"{'http' if local else 'https'}://{text}"
    scheme, netloc, fragment = _origin(text)
    fields = _fields(fragment)
    pin = fields.get("pin", "").replace(":", "").lower()
    if pin and not _PIN.fullmatch(pin):
        raise BadRequest(
            Sentence("the certificate pin of the join link is damaged; copy the link whole")
        )
    host = urlsplit(f"//{netloc}").hostname or ""
    if scheme == "volunteer":
        scheme = "http" if is_loopback(host) and not pin else "https"
    if scheme == "http" and not is_loopback(host):
        raise BadRequest(
            Sentence(
                "{netloc} would be reached without encryption; ask for a link that begins with "
                "https://",
                netloc=netloc,
            )
        )
    return JoinLink(
        url=f"{scheme}://{netloc}",
        fingerprint=fields.get("key", ""),
        tls_pin=pin,
        code=fields.get("code", ""),
    )


def bound_address(url: str, tls_pin: str) -> str:
    """Return the part of an encrypted address that a coordinator proves with its key, so that no
    other server can pass its proof on: the certificate's pin, or the address itself if the usual
    authorities vouch for the certificate; "" for an address without encryption.
    """
    return (tls_pin or url.removesuffix(":443")) if url.startswith("https://") else ""


def format_link(link: JoinLink) -> str:
    """Return a link in the form that is printed; `parse_link` is the inverse."""
    fields = [("key", link.fingerprint), ("pin", link.tls_pin), ("code", link.code)]
    fragment = "+".join(f"{name}={quote(value, safe=':')}" for name, value in fields if value)
    return f"{link.url}/join#{fragment}" if fragment else f"{link.url}/join"

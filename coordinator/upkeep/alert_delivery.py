"""Ways by which an alert reaches people: a POST of JSON, and mail."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import smtplib
import ssl
import urllib.error
import urllib.request
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import TYPE_CHECKING

import msgspec

from coordinator.storage.secret_file import read_secret
from shared.errors import Configuration, why
from shared.text import printable

if TYPE_CHECKING:
    from coordinator.config import Settings
    from coordinator.upkeep.alerts import Alert

WEBHOOK, MAIL = "webhook", "mail"
SEND_S = 10.0
SUBJECT_MAX = 120


class Ways:
    """Sends alerts by the ways that are set."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        wanted = {WEBHOOK: settings.alert_webhook, MAIL: settings.alert_mail_to}
        self.names = tuple(name for name, value in wanted.items() if value)

    async def send(self, way: str, alert: Alert) -> str:
        """Send an alert; return what went wrong, or ""."""
        if way not in self.names:
            return ""  # it was switched off meanwhile
        send = self._post if way == WEBHOOK else self._mail
        try:
            await asyncio.to_thread(send, alert)
        except Configuration as error:
            return error.message
        except smtplib.SMTPResponseException as error:
            return f"the mail server said {error.smtp_code} {error.smtp_error!r}"[:500]
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            smtplib.SMTPException,
            OSError,
            ValueError,
        ) as error:
            return (why(error) if isinstance(error, OSError) else str(error))[:500] or repr(error)
        return ""

    def _post(self, alert: Alert) -> None:
        """Raises URLError, HTTPException, OSError."""
        line = text_of(alert)
        # Chats read one of the two: `text` most of them, `content` Discord.
        body = msgspec.structs.asdict(alert) | {"text": line, "content": line}
        request = urllib.request.Request(  # http or https, checked by the settings
            self._settings.alert_webhook,
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json", "User-Agent": "volunteer-coordinator"},
        )
        with urllib.request.urlopen(request, timeout=SEND_S) as reply:
            reply.read(1)

    def _mail(self, alert: Alert) -> None:
        """Raises SMTPException, OSError, Configuration for a password file that others can read."""
        settings = self._settings
        context = ssl.create_default_context()
        made = (
            smtplib.SMTP_SSL(
                settings.smtp_host, settings.smtp_port, timeout=SEND_S, context=context
            )
            if settings.smtp_security == "tls"
            else smtplib.SMTP(settings.smtp_host, settings.smtp_port, timeout=SEND_S)
        )
        try:
            if settings.smtp_security == "starttls":
                made.starttls(context=context)
            if settings.smtp_user:
                password = read_secret(settings.smtp_password_file, "the password of the mail")
                made.login(settings.smtp_user, password)
            made.send_message(message_of(alert, settings))
        finally:  # what was accepted is delivered, whatever is said at the end
            with contextlib.suppress(smtplib.SMTPException, OSError):
                made.quit()


def text_of(alert: Alert) -> str:
    """Return an alert in one line."""
    over = "over: " if alert.state == "over" else ""
    return printable(f"{alert.server}: {over}{alert.message}", 1000)


def message_of(alert: Alert, settings: Settings) -> EmailMessage:
    """Return an alert as a mail."""
    line = text_of(alert)
    message = EmailMessage()
    message["Subject"] = line if len(line) <= SUBJECT_MAX else f"{line[: SUBJECT_MAX - 1]}…"
    message["From"] = settings.alert_mail_from or f"coordinator@{settings.smtp_host}"
    message["To"] = ", ".join(settings.mail_addresses)
    message["Date"] = formatdate(alert.at)
    message["Message-ID"] = make_msgid(domain="coordinator.invalid")
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(
        f"{line}\n\nkind: {alert.kind}\nabout: {printable(alert.about, 200) or 'the server'}\n"
        f"since: {formatdate(alert.since)}\n"
    )
    return message

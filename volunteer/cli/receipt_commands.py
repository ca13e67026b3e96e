"""receipts: the signed receipt of each payment, and the check that the record holds it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from volunteer.cli.exit_codes import EXIT_FAILURE, hinted, remark
from volunteer.cli.json_output import print_json, print_table
from volunteer.i18n.catalogue import N_, _, ngettext, number, shown

if TYPE_CHECKING:
    from volunteer.account.profile import Identity
    from volunteer.account.record_check import CheckedReceipt, RecordCheck
    from volunteer.settings.settings import Directories
    from volunteer.storage.receipts import ReceiptBook

app = App(name="receipts", help="Signed receipts of your payments: list and verify them.")

Profile = Annotated[str, Parameter(help="Profile on this host.")]
Json = Annotated[bool, Parameter(help="Print JSON.", negative="")]

EARNED, ESCROW = N_("earned"), N_("at stake")
KINDS = {"earn": EARNED, "vest": EARNED, "answered": EARNED, "escrow": ESCROW, "answer": ESCROW}
NONE = N_(
    "there are no receipts yet: a volunteer at work fetches them a moment after each payment, and "
    "`volunteer receipts verify` does too"
)


@app.command(name="list")
def listing(*, json: Json = False, profile: Profile = "") -> int:
    """List the receipts that are kept here, oldest first."""
    from datetime import UTC, datetime

    from volunteer.i18n.formats import credit

    _places, identity, book = _opened(profile)
    found = _checked(identity, book)
    rows = [_row(each) for each in found]
    if json:
        print_json(rows)
        return 0
    if not rows:
        print(hinted(_(NONE), profile))
        return 0
    lines = []
    for row in rows:
        if row["problem"]:
            lines.append(["-", "-", _("wrong: {problem}", problem=shown(row["problem"])), "-", "-"])
            continue
        at = datetime.fromtimestamp(row["at"], UTC).strftime("%Y-%m-%d %H:%M")
        paid = credit(row["credits_micro"], 2 if row["contribution"] is not None else 6)
        lines.append([at, paid, _(row["kind"]), _work(row), str(row["leaf"])])
    names = [_("at"), _("credits"), _("kind"), _("for"), _("entry")]
    print_table(names, lines, {1, 4})
    return 0


@app.command
def verify(
    *,
    offline: Annotated[
        bool, Parameter(help="Only what is kept here; ask nobody.", negative="")
    ] = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Verify signatures and proofs of the receipts, then that the record still begins with them.

    Exit code 1 where a receipt is wrong or the coordinator rewrote its history.
    """
    from shared.errors import NotFound, VolunteerError
    from volunteer.account.record_check import contradiction

    directories, identity, book = _opened(profile)
    history, unknown, code = "", "", 0
    try:
        history = "" if offline else asyncio.run(_ask(directories, identity, book))
    except NotFound:
        if book.seen.heads:
            history = _("the coordinator no longer shows the record that it signed before")
        else:
            unknown = _("this coordinator is of a version that keeps no public record")
    except VolunteerError as error:
        unknown = _("the present record was not checked: {error}", error=shown(error.message))
        code = error.exit_code
    found = _checked(identity, book)
    heads = [each.receipt.tree for each in found if each.receipt is not None]
    kept = [each.tree for each in book.seen.heads]
    history = history or contradiction([*kept, *heads])
    problems = [_named(each) for each in found if each.problem]
    if history or problems:
        code = EXIT_FAILURE
    if json:
        said: dict[str, Any] = {"receipts": len(found), "problems": problems, "history": history}
        print_json(said | {"heads": len(kept), "online": not offline, "unknown": unknown})
        return code
    for problem in problems:
        print(_("wrong: {problem}", problem=problem))
    if history:
        evidence = _(
            "{problem}; the signed evidence is in {folder}",
            problem=shown(history),
            folder=book.folder,
        )
        print(_("wrong: {problem}", problem=evidence))
    print(_summary(len(found), len(problems), online=not (offline or unknown or history)))
    if unknown:
        remark(unknown)
    return code


@app.command
def accept(*, json: Json = False, profile: Profile = "") -> int:
    """Set all that was kept aside and begin with the coordinator's present record.

    For a coordinator that was restored from a backup, if its organiser says so.
    """
    from volunteer.account.profile import Profile as ProfileDirectory

    directories, _identity, book = _opened(profile)
    with ProfileDirectory(directories.profile).lock():
        aside = book.accept()
    if json:
        return print_json({"aside": None if aside is None else str(aside)})
    print(_("set aside in {path}", path=aside) if aside else _("nothing was kept yet"))
    return 0


def _opened(profile: str) -> tuple[Directories, Identity, ReceiptBook]:
    """Return the receipts of the account in use. Raises Configuration without one."""
    from shared.errors import Configuration
    from volunteer.account.profile import Profile as ProfileDirectory
    from volunteer.cli.start import NOT_JOINED
    from volunteer.settings.settings import directories
    from volunteer.storage.receipts import ReceiptBook

    places = directories(profile=profile)
    mine = ProfileDirectory(places.profile)
    identity = mine.current()
    if identity is None:
        raise Configuration(NOT_JOINED)
    return places, identity, ReceiptBook(mine.home(identity).receipts)


def _checked(identity: Identity, book: ReceiptBook) -> list[CheckedReceipt]:
    from volunteer.account.record_check import check_receipt

    return [
        check_receipt(signed, identity.public_key, identity.volunteer_id) for signed in book.all()
    ]


async def _ask(directories: Directories, identity: Identity, book: ReceiptBook) -> str:
    """Compare the record with the stored receipts; new ones are fetched first."""
    from volunteer.account.profile import Profile as ProfileDirectory
    from volunteer.account.record_check import RecordCheck
    from volunteer.cli.start import ask_coordinator

    profile = ProfileDirectory(directories.profile)

    async def ask(api: Any) -> str:
        check = RecordCheck(api, book, identity.public_key, identity.volunteer_id)
        said = await _fetched(profile, check) or await check.check_all()
        if said and (restored := await check.restored()):
            print(restored, file=sys.stderr)
            return await check.check_all()
        return said

    return await ask_coordinator(directories, ask)


async def _fetched(profile: Any, check: RecordCheck) -> str:
    """Fetch new receipts, where no volunteer at work does so; a shut-out account gets none."""
    from shared.errors import Configuration, Forbidden, Unauthorized

    try:
        with profile.lock():
            return await check.fetch()
    except (Configuration, Forbidden, Unauthorized):
        return ""


def _row(checked: CheckedReceipt) -> dict[str, Any]:
    receipt = checked.receipt
    if receipt is None:
        return {"problem": checked.problem}
    return {
        "at": receipt.entry.at,
        "run": receipt.run,
        "contribution": receipt.contribution,
        "version": receipt.version,
        "credits_micro": receipt.credits_micro,
        "kind": KINDS.get(receipt.entry.kind, receipt.entry.kind),
        "leaf": receipt.leaf,
        "problem": checked.problem,
    }


def _work(row: dict[str, Any]) -> str:
    """Return the purpose of a receipt."""
    run = row["run"]
    if row["contribution"] is None:
        return _("an answer of {run}", run=run)
    of_run = _("contribution {id} of {run}", id=row["contribution"], run=run)
    if row["version"] is None:
        return _("{contribution}, in no version", contribution=of_run)
    return _("{contribution}, in version {version}", contribution=of_run, version=row["version"])


def _named(checked: CheckedReceipt) -> str:
    """Return the problem of a receipt, with its name."""
    receipt, problem = checked.receipt, shown(checked.problem)
    if receipt is None:
        return _("a receipt: {problem}", problem=problem)
    if receipt.contribution is None:
        return _("the receipt of an answer of {run}: {problem}", run=receipt.run, problem=problem)
    return _(
        "the receipt of contribution {id}: {problem}", id=receipt.contribution, problem=problem
    )


def _summary(receipts: int, wrong: int, *, online: bool) -> str:
    if wrong:
        return ngettext(
            "{wrong} of {n} receipt wrong",
            "{wrong} of {n} receipts wrong",
            receipts,
            wrong=number(wrong, ","),
        )
    said = ngettext("{n} receipt verified", "{n} receipts verified", receipts)
    return _("{said}; the coordinator's record still holds them", said=said) if online else said

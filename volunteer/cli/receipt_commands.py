"""receipts: the signed receipt of each payment, and the check that the record holds it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from volunteer.cli.exit_codes import EXIT_FAILURE, remark
from volunteer.cli.json_output import print_json
from volunteer.cli.options import Json, Profile
from volunteer.i18n.catalogue import _, ngettext, number, translated

if TYPE_CHECKING:
    from volunteer.account.profile_directory import Identity
    from volunteer.account.record_check import CheckedReceipt, RecordCheck
    from volunteer.settings.settings import Directories
    from volunteer.storage.receipts import ReceiptBook

app = App(name="receipts", help="Signed receipts of your payments.")


@app.command
def verify(
    *,
    offline: Annotated[
        bool, Parameter(help="Check only the receipts, without the coordinator.", negative="")
    ] = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Verify the receipts, and that the coordinator's record still contains them.

    Exit code 1 where a receipt is wrong or the coordinator rewrote its history.
    """
    from shared.errors import NotFound, VolunteerError
    from volunteer.account.record_check import contradiction

    directories, identity, book = _open_receipts(profile)
    history, unknown, code = "", "", 0
    try:
        history = "" if offline else asyncio.run(_ask(directories, identity, book))
    except NotFound:
        if book.signed_heads.heads:
            history = _("the coordinator no longer shows the record that it signed before")
        else:
            unknown = _("this coordinator is of a version that keeps no public record")
    except VolunteerError as error:
        unknown = _("the present record was not checked: {error}", error=translated(error.message))
        code = error.exit_code
    results = _check_receipts(identity, book)
    heads = [result.receipt.tree for result in results if result.receipt is not None]
    trees = [head.tree for head in book.signed_heads.heads]
    history = history or contradiction([*trees, *heads])
    problems = [_problem_sentence(result) for result in results if result.problem]
    if history or problems:
        code = EXIT_FAILURE
    if json:
        report: dict[str, object] = {
            "receipts": len(results),
            "problems": problems,
            "history": history,
        }
        print_json(report | {"heads": len(trees), "online": not offline, "unknown": unknown})
        return code
    for problem in problems:
        print(_("wrong: {problem}", problem=problem))
    if history:
        evidence = _(
            "{problem}; the signed evidence is in {folder}",
            problem=translated(history),
            folder=book.folder,
        )
        print(_("wrong: {problem}", problem=evidence))
    print(_summary(len(results), len(problems), online=not (offline or unknown or history)))
    if unknown:
        remark(unknown)
    return code


@app.command
def accept(*, json: Json = False, profile: Profile = "") -> int:
    """Move the receipts kept so far to a folder, and trust the coordinator's present record.

    For a coordinator that was restored from a backup, if its organiser says so.
    """
    from volunteer.account.instance_lock import instance_lock

    directories, _identity, book = _open_receipts(profile)
    with instance_lock(directories.profile):
        aside = book.start_anew()
    if json:
        return print_json({"aside": None if aside is None else str(aside)})
    print(_("set aside in {path}", path=aside) if aside else _("nothing was kept yet"))
    return 0


def _open_receipts(profile: str) -> tuple[Directories, Identity, ReceiptBook]:
    """Return the receipts of the account in use. Raises Configuration if no account is in use."""
    from volunteer.account.profile_directory import Profile as ProfileDirectory
    from volunteer.cli.start import identity_of
    from volunteer.settings.settings import directories
    from volunteer.storage.receipts import ReceiptBook

    places = directories(profile=profile)
    identity = identity_of(places)
    return places, identity, ReceiptBook(ProfileDirectory(places.profile).home(identity).receipts)


def _check_receipts(identity: Identity, book: ReceiptBook) -> list[CheckedReceipt]:
    from volunteer.account.record_check import check_receipt

    return [
        check_receipt(signed, identity.public_key, identity.volunteer_id) for signed in book.all()
    ]


async def _ask(directories: Directories, identity: Identity, book: ReceiptBook) -> str:
    """Fetch new receipts, then compare the stored heads with the record; return a sentence about a
    fault, else "".
    """
    from volunteer.account.profile_directory import Profile as ProfileDirectory
    from volunteer.account.record_check import RecordCheck
    from volunteer.cli.start import ask_coordinator

    profile = ProfileDirectory(directories.profile)

    async def ask(api: Any) -> str:
        check = RecordCheck(api, book, identity.public_key, identity.volunteer_id)
        problem = await _fetch(profile, check) or await check.check_all()
        if problem and (restore_sentence := await check.accept_restore()):
            print(restore_sentence, file=sys.stderr)
            return await check.check_all()
        return problem

    return await ask_coordinator(directories, ask)


async def _fetch(profile: Any, check: RecordCheck) -> str:
    """Fetch new receipts, unless a running volunteer does so or the coordinator refuses them, as to
    a banned account. Return a sentence about a wrong receipt, else "".
    """
    from shared.errors import Forbidden, Unauthorized
    from volunteer.account.instance_lock import ProfileAtWork, instance_lock

    try:
        with instance_lock(profile.path):
            return await check.fetch()
    except (ProfileAtWork, Forbidden, Unauthorized):
        return ""


def _problem_sentence(checked: CheckedReceipt) -> str:
    """Return the problem of a receipt, with the receipt's name."""
    receipt, problem = checked.receipt, translated(checked.problem)
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
    if not receipts:
        return _("no receipts yet: each payment for your work brings one")
    sentence = ngettext("{n} receipt verified", "{n} receipts verified", receipts)
    return (
        _("{said}; the coordinator's record still holds them", said=sentence)
        if online
        else sentence
    )

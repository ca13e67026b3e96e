"""Versions of a run that have a sample, loaded page by page around the viewed one."""

from __future__ import annotations

from shared.protocol import endpoints
from shared.protocol.versions import VersionInfo
from volunteer.control.control import Control

PAGE = 100  # versions loaded at once: one page of the coordinator
PAGES_MAX = 20  # most pages of one search: runs that are rarely evaluated have long gaps
ROWS_MAX = 2000  # most versions kept


class SampleHistory:
    """Loaded versions by number; `head` is the newest loaded version, -1 if none is loaded."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.rows: dict[int, VersionInfo] = {}
        self.head = -1
        self._first: int | None = None

    def first(self) -> int | None:
        """Return the first version with a sample; None if the first page of versions has none."""
        return self._first

    def last(self) -> int | None:
        """Return the newest loaded version with a sample; None if no loaded version has one."""
        return max((n for n, row in self.rows.items() if row.sample), default=None)

    async def begin(self, control: Control, head: int) -> None:
        """Load the newest page, and the first page as long as no sample was found on it. Raises
        VolunteerError.
        """
        if self._first is None:
            await self._load(control, -1, 0)
            self._first = min((n for n, row in self.rows.items() if row.sample), default=None)
        newest = max(head, self.head)
        if newest > 0:
            # versions not evaluated yet are queried again
            await self._load(control, max(-1, min(newest, self.last() or 0) - 1), newest)
            await self._load(control, newest - PAGE, newest)
        self.head = max(self.rows, default=-1)

    async def step(self, control: Control, at: int, by: int) -> int | None:
        """Return the first version with a sample that is at least `by` versions from `at`, towards
        newer versions if `by` is positive; None if no such version has a sample. Raises
        VolunteerError.
        """
        direction = 1 if by > 0 else -1
        target, pages = at + by, 0
        target = min(max(target, 0), self.head) if abs(by) > 1 else target
        while 0 <= target <= self.head:
            row = self.rows.get(target)
            if row is None:
                pages += 1
                if pages > PAGES_MAX:
                    return None
                after = target - 1 if direction > 0 else max(-1, target - PAGE)
                await self._load(control, after, target, at)
                if target not in self.rows:  # dropped meanwhile
                    target += direction
                continue
            if row.sample:
                return target if target != at else None
            target += direction
        return None

    async def _load(self, control: Control, after: int, *needed: int) -> None:
        """Load a page of versions. If there are too many, drop the versions far from `needed`, but
        never the first version with a sample, or the newest page.
        """
        cursor = "" if after < 0 else after
        for row in await control.query(endpoints.VERSIONS, run=self.run, cursor=cursor):
            self.rows[row.version] = row
        excess = len(self.rows) - ROWS_MAX
        if excess > 0:
            kept_rows = {self._first, *sorted(self.rows)[-PAGE:], *needed}
            droppable = [version for version in self.rows if version not in kept_rows]
            droppable.sort(key=lambda version: -abs(version - needed[0]))
            for version in droppable[:excess]:
                self.rows.pop(version)

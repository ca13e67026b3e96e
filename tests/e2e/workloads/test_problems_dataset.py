"""Problems with verified answers become a dataset, or a sentence names the wrong line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.admin.datasets import AddDataset, add
from shared.errors import InvalidRunFile
from tests.support.local_coordinator import local_coordinator


async def test_problems_are_stored_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    lines = [json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) for n in range(20)]
    good.write_text("\n".join(lines))
    bad.write_text("\n".join([*lines, json.dumps({"prompt": "5 + 1 ="})]))
    async with local_coordinator(tmp_path / "home") as home:
        asked = AddDataset(name="sums", problems=(str(good),), licence="MIT", heldout_share=0.1)
        shown = await add(home.coordinator, asked)
        assert (shown.kind, shown.items, shown.heldout, shown.licence) == ("problems", 18, 2, "MIT")
        with pytest.raises(InvalidRunFile, match=r"bad.jsonl line 21: the problem has no answer"):
            await add(home.coordinator, AddDataset(name="more", problems=(str(bad),)))

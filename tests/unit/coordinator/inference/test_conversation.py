"""Conversations of a model are refused where its template does not work, and that is found out
once.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from coordinator.inference.inference_process import LoadedVersion
from shared.errors import BadRequest
from shared.workloads.data.chat_template import ChatTemplate

ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_is_judged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "template"
    file.write_bytes(msgspec.json.encode(ChatTemplate(ENDLESS)))
    judged: list[ChatTemplate] = []
    frame = ChatTemplate.frame

    def counted(template: ChatTemplate) -> Any:
        judged.append(template)
        return frame(template)

    monkeypatch.setattr(ChatTemplate, "frame", counted)
    nothing: Any = SimpleNamespace()
    loaded = LoadedVersion(nothing, nothing, str(file))
    for _ in range(3):
        with pytest.raises(BadRequest, match="does not come to an end"):
            loaded.conversation  # noqa: B018
    assert len(judged) == 1

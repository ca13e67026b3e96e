"""Cards of exported versions: what people wrote cannot become anything else there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.runs.model_card import CardFacts, StatedShare, card


def facts(**changes: Any) -> CardFacts:
    values: dict[str, Any] = {
        "run": "tiny", "version": 3, "description": "Sums.", "workload": "gpt",
        "workload_version": 1, "parameters": 1234567, "output": "text",
        "measure": "loss", "loss": 3.25, "trained_on": "sums", "global_step": 10,
        "items": "tokens", "count": 2000, "licence": "Apache-2.0", "contact": "",
        "library": "", "packages": "", "code": ["print(1)"],
    }  # fmt: skip
    return CardFacts(**(values | changes))


def front(text: str) -> dict[str, Any]:
    """The lines that hubs read: YAML, whose values are written as JSON."""
    begin, lines, _ = text.split("---\n", 2)
    assert begin == ""
    pairs = [line.split(": ", 1) for line in lines.splitlines()]
    return {key: json.loads(value) for key, value in pairs}


def test_the_measure_has_its_unit_and_a_missing_one_is_said() -> None:
    assert "- held-out loss: 3.2500 nats a token (measured by" in card(facts())
    assert "- Fréchet distance: 3.2500 (measured" in card(facts(measure="distance", output="image"))
    assert "- held-out loss: not measured\n" in card(facts(loss=None))
    share = StatedShare(share=0.8125, error=0.0244, problems=256)
    text = card(facts(measure="share solved", loss=0.1875, solved=share))
    assert "- share solved: 81.2% ± 2.4% of 256 held-out problems (measured by" in text
    assert "0.1875" not in text  # the share that is not solved


def test_hubs_read_licence_library_and_task() -> None:
    assert front(card(facts(library="transformers"))) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["volunteer-computing", "gpt"],
    }


def test_hubs_read_base_and_data() -> None:
    more = {"base_model": "ann/tiny", "dataset": "ann/sums"}
    found = front(card(facts(workload="causal-lm", library="peft", **more)))
    assert (found["base_model"], found["base_model_relation"]) == ("ann/tiny", "adapter")
    assert found["datasets"] == ["ann/sums"]
    assert found["pipeline_tag"] == "text-generation"
    assert front(card(facts(library="transformers", **more)))["base_model_relation"] == "finetune"


@pytest.mark.parametrize("licence", ['x"\n---\nlicense: mit', "ours: *all*", "{{", "私のもの"])
def test_a_licence_of_any_words_stays_one(licence: str) -> None:
    found = front(card(facts(licence=licence)))
    assert found["license"] == "other"
    assert set(found) == {"license", "license_name", "pipeline_tag", "tags"}


def test_a_sample_ends_where_its_fence_does() -> None:
    sample = "a\n```\n# not a heading\n````\nb"
    text = card(facts(sample=sample))
    assert f"`````text\n{sample}\n`````\n" in text
    assert "A sample" not in card(facts(sample=" \n"))

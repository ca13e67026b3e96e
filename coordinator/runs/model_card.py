"""Model card of an exported version, README.md: measure, origin, example code, sample."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from shared.protocol.accounts import PrivacySpent
from shared.protocol.versions import SuiteCourse, SuiteScore
from shared.text import printable
from shared.workloads.declaration import MEASURES, Measure, Output

PICTURE = "version.png"  # the version's own sample, next to the card
OWN = "the package that the run's volunteers have installed"
_TASKS: Mapping[Output, str] = {
    "text": "text-generation",
    "image": "unconditional-image-generation",
}
# Licences that let everybody have a model, named as on hubs; others keep their own name.
KNOWN_LICENCES = (
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "unlicense", "openrail"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0"),
)


class StatedShare(msgspec.Struct, frozen=True, kw_only=True):
    """Share of held-out problems that a version solves, with its standard error."""

    share: float
    error: float
    problems: int  # 0 = unknown

    @property
    def text(self) -> str:
        of = f" of {self.problems:,} held-out problems" if self.problems else ""
        return f"{self.share:.1%} ± {self.error:.1%}{of}"


class CardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a model card."""

    run: str
    version: int
    description: str
    workload: str
    workload_version: int
    parameters: int
    output: Output
    measure: Measure
    loss: float | None
    solved: StatedShare | None = None  # measured share of held-out problems
    trained_on: str
    global_step: int
    items: str  # unit of `count`
    count: int
    licence: str
    contact: str
    # library that loads the model, by its name on hubs; "" for this program's own format
    library: str
    packages: str  # packages that the code needs; "" if it needs this program
    code: Sequence[str]
    sample: str = ""  # text that the version generated
    pictured: bool = False  # `PICTURE` is in the folder
    bits: float | None = None  # bits for each byte of held-out text
    suites: Sequence[SuiteCourse] = ()  # scores up to this version
    base_model: str = ""  # name of the base model on a hub
    dataset: str = ""
    privacy: PrivacySpent | None = None


def card(facts: CardFacts) -> str:
    """Return the text of README.md."""
    return "\n".join(
        [
            *_front(facts),
            f"# {facts.run}, version {facts.version}",
            "",
            facts.description or "Trained by volunteers.",
            "",
            f"- workload: {facts.workload} {facts.workload_version}, {facts.parameters:,} "
            "parameters",
            f"- {measured(facts)}",
            *([f"- bits a byte of held-out text: {facts.bits:.4f}"] if facts.bits else []),
            f"- trained on: {facts.trained_on}",
            f"- global steps: {facts.global_step:,}",
            f"- {facts.items}: {facts.count:,}",
            *([f"- differential privacy: {facts.privacy.text}"] if facts.privacy else []),
            f"- licence: {facts.licence}; contact: {facts.contact or 'none given'}",
            "",
            f"In this folder, with {f'`pip install {facts.packages}`' if facts.packages else OWN}:",
            "",
            "```python",
            *facts.code,
            "```",
            "",
            *_suites(facts.suites),
            *_sample(facts),
        ]
    )


def _suites(courses: Sequence[SuiteCourse]) -> list[str]:
    """Return a table of the scores before training and of this version."""
    if not courses:
        return []
    rows = [
        f"| {s.name} | {s.chance:.1%} | {_score(s.first)} | {_score(s.newest)} |" for s in courses
    ]
    chat = " Prompts are asked by the chat template of its data." if courses[0].chat else ""
    return [
        f"Task suites: share answered rightly, with its standard error.{chat}",
        "",
        "| suite | by chance | before | after |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _score(score: SuiteScore | None) -> str:
    if score is None:
        return "not measured"
    return f"{score.text} (version {score.version}, {score.examples:,} examples)"


def measured(facts: CardFacts) -> str:
    """Return the measure of a version in words."""
    name = MEASURES[facts.measure]
    if facts.loss is None:
        return f"{name}: not measured"
    if facts.solved is not None:
        return f"{name}: {facts.solved.text} (measured by the coordinator)"
    unit = " nats a token" if (facts.output, facts.measure) == ("text", "loss") else ""
    return f"{name}: {facts.loss:.4f}{unit} (measured by the coordinator)"


def _front(facts: CardFacts) -> list[str]:
    """Return the header that hubs read; JSON is valid YAML, and its quotes keep any text from
    becoming a key.
    """
    licence = facts.licence.strip().lower()
    lines: dict[str, Sequence[str]] = {"tags": ["volunteer-computing", facts.workload]}
    lines |= {"datasets": [facts.dataset]} if facts.dataset else {}
    fields: dict[str, str] = {}
    if facts.base_model:
        fields["base_model"] = facts.base_model
        fields["base_model_relation"] = "adapter" if facts.library == "peft" else "finetune"
    if licence in KNOWN_LICENCES:
        fields["license"] = licence
    elif licence:
        fields |= {"license": "other", "license_name": printable(facts.licence, 96)}
    if facts.library:
        fields["library_name"] = facts.library
    if facts.output in _TASKS:
        fields["pipeline_tag"] = _TASKS[facts.output]
    pairs = [
        f"{key}: {msgspec.json.encode(value).decode()}" for key, value in (fields | lines).items()
    ]
    return ["---", *pairs, "---", ""]


def _sample(facts: CardFacts) -> list[str]:
    if facts.pictured:
        return ["A sample of this version:", "", f"![sample]({PICTURE})", ""]
    if not facts.sample.strip():
        return []
    longest = max((len(ticks) for ticks in re.findall("`+", facts.sample)), default=0)
    fence = "`" * max(3, longest + 1)
    return ["A sample of this version:", "", f"{fence}text", facts.sample.rstrip(), fence, ""]

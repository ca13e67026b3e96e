"""Prompts: API keys and their usage, answers by volunteers' machines, and OpenAI's requests.

OpenAI's requests are strict: an unlisted field is refused by name, so that no caller relies on an
option without effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shared.protocol.base import Message, Number, Word
from shared.protocol.versions import SignedManifest
from shared.workloads.declaration import Output

KEYS_MAX = 5  # most keys of one account
STOPS_MAX = 4
CHOICES_MAX = 8
PROMPTS_MAX = 64  # prompts of one request
TOOLS_MAX = 64  # functions of one request
BIASED_MAX = 1024  # tokens of one `logit_bias`
IMAGES_MAX = 16  # images of one request
SENT_TOKENS_MAX = 4096  # tokens that a machine sends at a time
DEFAULT_TOKENS = 128  # most tokens of an answer whose request names no maximum

KeyState = Literal["active", "revoked", "expired"]
Words: TypeAlias = Annotated[tuple[Word, ...], Meta(max_length=64)]


class KeyRequest(Message):
    """Request for a key: its name, the most credits it may ever spend, its end, and its runs."""

    name: Word = ""
    cap_micro: Number | None = None
    expires_at: float | None = None  # UTC epoch seconds
    runs: Words = ()  # () = every run


class KeyInfo(Message):
    """A key without its secret."""

    id: int
    name: str
    prefix: str  # beginning of the key
    state: KeyState
    spent_micro: int
    cap_micro: int | None
    runs: tuple[str, ...]
    created_at: float
    expires_at: float | None


class NewKey(Message):
    """Key at its creation: the only time it is shown."""

    key: str
    info: KeyInfo


class UsageRow(Message):
    """One request; no prompt is kept."""

    id: str
    at: float
    model: str
    kind: str  # completion, chat, image
    key: str  # prefix of the key; "" = a machine of the account
    tokens_in: int
    tokens_out: int  # tokens written or scored, or images of an image request
    cost_micro: int
    free: bool
    latency_s: float | None  # None = not ended yet
    first_token_s: float | None


class GiveRequest(Message):
    """Gift of earned credits to another account; a repeated `id` gives nothing more."""

    id: Word
    to: Annotated[str, Meta(max_length=256)]
    amount_micro: Number


class Given(Message):
    """Confirmation of a gift."""

    to: str
    amount_micro: int
    left_micro: int


# --- machines of volunteers that answer ---


class AnswerOffer(Message):
    """Offer of a machine to answer prompts of these runs; of any run if it names no run."""

    runs: Words = ()
    wait_s: float = 0.0  # longest wait for a prompt (a long poll)


class AnswerTask(Message):
    """Prompt to continue. The seed fixes the sampling, so that two machines' answers can be
    compared.
    """

    id: str
    manifest: SignedManifest
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    place: int  # number of answer tokens that the prompt already holds
    temperature: float
    top_p: float
    end: int | None  # token that ends a text


class AnswerWork(Message):
    """Answer to compute; `task` is None if no prompt came within the wait."""

    task: AnswerTask | None = None


class AnswerTokens(Message):
    """Next tokens of an answer, from place `start` on; `finish` ends the answer."""

    start: Number
    tokens: Annotated[tuple[Number, ...], Meta(max_length=SENT_TOKENS_MAX)] = ()
    finish: Literal["", "stop", "length", "failed"] = ""


class AnswerGoOn(Message):
    """Reply to tokens of an answer; False = no more tokens are wanted."""

    go_on: bool


# --- OpenAI's requests ---

Sequences: TypeAlias = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)] | None
LogitBias: TypeAlias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=BIASED_MAX),
]
# Fields of OpenAI's requests without an effect here, and the values (besides null) at which they
# are accepted, because they ask for nothing. A field that a request struct declares is read, and
# not looked up here.
IDLE: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "include_obfuscation": (False,),
    **dict.fromkeys(("size", "quality", "background", "moderation"), ("auto",)),
    "output_format": ("png",),
}
LABELS = ("user", "safety_identifier", "prompt_cache_key")  # accepted at any value, and ignored
# Addition to OpenAI's fields: "organiser" keeps a prompt off the machines of volunteers.
AnsweredBy: TypeAlias = Literal["organiser"] | None
Stop: TypeAlias = str | tuple[str, ...] | None


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of OpenAI's requests."""


class StreamOptions(_Strict, frozen=True, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool = False


class _Sampled(_Strict, frozen=True, kw_only=True):
    """Request for texts of a model, with the options of OpenAI, and of other servers, that shape
    the choice of a token.
    """

    model: str
    answered_by: AnsweredBy = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: Stop = None
    n: Sequences | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: LogitBias | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None  # 0 and -1: all tokens
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None


# a text, or its tokens
Prompt: TypeAlias = str | Annotated[tuple[Number, ...], Meta(max_length=1 << 20)]


class CompletionRequest(_Sampled, frozen=True, kw_only=True):
    """Texts to continue."""

    prompt: Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=PROMPTS_MAX)]
    echo: bool = False
    # 0 with `echo`: the prompt's probabilities only
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


class TextPart(_Strict, frozen=True, kw_only=True):
    """Text part of a message."""

    type: Literal["text"]
    text: str


FunctionName: TypeAlias = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionCall(_Strict, frozen=True, kw_only=True):
    """Name of a called function, and its arguments as a JSON text."""

    name: FunctionName
    arguments: str


class ToolCalled(_Strict, frozen=True, kw_only=True):
    """Call of a function in an earlier answer of the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolFunction(_Strict, frozen=True, kw_only=True):
    """Function that an answer may call; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool | None = None  # True: arguments follow the schema wherever a call is required


class Tool(_Strict, frozen=True, kw_only=True):
    """Tool that an answer may use: a function."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(_Strict, frozen=True, kw_only=True):
    """Name of a function."""

    name: FunctionName


class ToolNamed(_Strict, frozen=True, kw_only=True):
    """Tool choice that requires a call of one function."""

    type: Literal["function"]
    function: NamedFunction


class AnswerSchema(_Strict, frozen=True, kw_only=True):
    """JSON schema of an answer."""

    name: str = ""
    description: str = ""
    schema: dict[str, Any] = {}
    strict: bool | None = None  # accepted at any value: an answer always follows its schema


class ResponseFormat(_Strict, frozen=True, kw_only=True):
    """Form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: AnswerSchema | None = None


class ChatMessage(_Strict, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[TextPart, ...]
    name: str = ""  # never sent to the model
    tool_calls: Annotated[tuple[ToolCalled, ...], Meta(max_length=TOOLS_MAX)] = ()
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(_Sampled, frozen=True, kw_only=True):
    """Conversation to continue."""

    messages: Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=1000)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[tuple[Tool, ...], Meta(max_length=TOOLS_MAX)] = ()
    tool_choice: Literal["none", "auto", "required"] | ToolNamed | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}  # variables of the model's chat template


class ImageRequest(_Strict, frozen=True, kw_only=True):
    """Pictures of an image run; the prompt is accepted but ignored."""

    model: str
    prompt: str = ""
    n: Annotated[int, Meta(ge=1, le=IMAGES_MAX)] | None = None
    seed: Seed | None = None
    response_format: Literal["b64_json"] = "b64_json"


class ImageData(msgspec.Struct, frozen=True, kw_only=True):
    """One picture: PNG, base64 on the wire."""

    b64_json: bytes


class ImageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Price of pictures in micro-credits."""

    cost_micro: int = 0


class ImageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures of an image run."""

    created: int
    data: tuple[ImageData, ...]
    usage: ImageUsage = ImageUsage()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request, and its price in micro-credits (an addition to OpenAI's fields)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cost_micro: int = 0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Model that answers prompts: OpenAI's four fields, then ours."""

    id: str
    created: int
    owned_by: str
    object: str = "model"
    description: str = ""
    licence: str = ""
    dataset: str = ""
    loss: float | None = None
    version: int = 0
    parameters: int = 0
    price_micro: int = 0  # price of a thousand tokens, or of one image
    output: Output = "text"  # an image model ignores the prompt
    # "volunteers": machines of volunteers may answer too, and these volunteers can read the prompts
    answered_by: str = "organiser"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models that answer prompts."""

    data: tuple[ModelCard, ...]
    object: str = "list"


class OpenAiError(msgspec.Struct, frozen=True, kw_only=True):
    """Refusal in OpenAI's form; `param` names the wrong field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAiErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every refusal below /v1."""

    error: OpenAiError

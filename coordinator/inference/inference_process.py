"""Inference process: loads versions and generates tokens on its server's orders.

`python -m coordinator.inference.inference_process FD` with a socket to the server; it ends when the
socket closes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import random
import resource
import socket
import sys
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from threading import Thread

import msgspec
import psutil

from coordinator.compute import yield_to_server
from coordinator.inference import process_messages
from coordinator.inference.grammar import Grammars
from coordinator.inference.inference_engine import (
    AnswerPiece,
    ChatPrompt,
    InvalidField,
    PreparedPrompt,
    TokenLogprob,
    check_length,
)
from shared.decoding import MALFORMED, decode
from shared.errors import BadRequest, Internal, VolunteerError
from shared.programs import gc_freeze
from shared.programs.machine_limits import memory_bytes
from shared.workloads.base import Reader
from shared.workloads.data.chat_template import ChatTemplate
from shared.workloads.data.tool_calls import ToolCallForm
from shared.workloads.generation.batch import Batch, NextToken
from shared.workloads.generation.prompt_text import ending
from shared.workloads.generation.sampling import SampledToken, agrees, probed, uniform

SLOTS = 16  # sequences that one version generates at once; more wait
COMPARED_MAX = 128  # most tokens of an answer that are compared
MEMORY_SHARE = 0.5  # share of the memory (the GPU's, if there is one) that versions may use
ROOM = 0.9  # if loading would fill more than this share of that limit, idle versions are dropped
# Memory for loading a version, as a multiple of its file: some parts exist twice for a moment, and
# slots need keys and values.
LOADING = 3.0
NICENESS = 10  # lower priority than the server, and than its processes for checks and evaluation
NO_TOOLS = "the chat template of this model writes no functions, or no calls of them as JSON"
OOM_SCORE = "900"  # of 1000: the kernel ends this process first when memory is short


class LoadedVersion:
    """Loaded version, and the sequences that it generates."""

    def __init__(self, reader: Reader, texts: Batch, template: str | None) -> None:
        self.reader = reader
        self.texts = texts
        self.grammars = Grammars(reader)
        self._template = template
        self.probed: set[str] = set()  # sequences whose probabilities are wanted

    @property
    def conversation(self) -> Conversation:
        """Return the formatter of conversations. Raises BadRequest for a model without one."""
        if isinstance(self._conversation_or_reason, str):
            raise BadRequest(self._conversation_or_reason)
        return self._conversation_or_reason

    @cached_property
    def _conversation_or_reason(self) -> Conversation | str:
        """Return the formatter of conversations, or the reason why the model has no formatter."""
        if self._template is None:
            return "the tokenizer of this model has no chat template here"
        try:
            return Conversation(Path(self._template), self.reader)
        except BadRequest as error:
            return error.message


class InferenceProcess:
    """Executes the orders of a server, one token of each sequence at a time."""

    def __init__(self, server: socket.socket, memory: VersionMemory) -> None:
        self._server = server
        self._orders: queue.SimpleQueue[process_messages.Order] = queue.SimpleQueue()
        self._memory = memory
        self._loaded: OrderedDict[str, LoadedVersion] = OrderedDict()  # least recently used first
        # key and version of the newest request for images
        self._drawing: tuple[str, DrawingVersion] | None = None

    def run(self) -> None:
        """Work until the server closes the socket, which ends this process."""
        Thread(target=self._listen, daemon=True).start()
        while True:
            busy = [loaded for loaded in self._loaded.values() if len(loaded.texts)]
            self._handle_orders(wait=not busy)
            for loaded in busy:
                self._step(loaded)

    def _step(self, loaded: LoadedVersion) -> None:
        """Generate a token of each sequence of a version; if that fails, fail them all and unload
        the version, so that the next prompt finds free memory.
        """
        try:
            for token in loaded.texts.step():
                self._send(
                    process_messages.GeneratedPiece(id=token.id, piece=_piece(loaded, token))
                )
        except (MemoryError, RuntimeError) as error:
            failure = _failure(error)
            for sequence_id in loaded.texts.clear():
                self._send(
                    process_messages.OrderFailed(
                        id=sequence_id, code=Internal.code, message=failure
                    )
                )
            for key in [key for key, version in self._loaded.items() if version is loaded]:
                del self._loaded[key]
            gc.collect()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, *MALFORMED), self._server.makefile("rb") as stream:
            while (
                len(head := stream.read(process_messages.HEAD.size)) == process_messages.HEAD.size
            ):
                (size,) = process_messages.HEAD.unpack(head)
                if size > process_messages.FRAME_BYTES_MAX:
                    break
                self._orders.put(process_messages.ORDERS.decode(stream.read(size)))
        os._exit(0)  # ends at once, even in the middle of a computation: the server is gone

    def _handle_orders(self, wait: bool) -> None:
        """Handle the orders that have come; with `wait`, wait for the first order."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._orders.get(block=wait))
                wait = False

    def _handle(self, order: process_messages.Order) -> None:
        if isinstance(order, process_messages.Cancel):
            for loaded in self._loaded.values():
                loaded.texts.cancel(order.id)
                loaded.probed.discard(order.id)
            return
        try:
            self._execute(order)
        except VolunteerError as error:
            self._send(
                process_messages.OrderFailed(
                    message=error.message,
                    param=error.param if isinstance(error, InvalidField) else "",
                    retry_after_s=error.retry_after_s,
                    code=error.code,
                    id=order.id,
                )
            )
        except Exception as error:
            failure = _failure(error)
            self._send(
                process_messages.OrderFailed(id=order.id, code=Internal.code, message=failure)
            )

    def _execute(self, order: process_messages.Question) -> None:
        if isinstance(order, process_messages.DrawPictures):
            self._send(process_messages.DrawnPictures(id=order.id, images=self._images(order)))
            return
        loaded = self._version(order.model)
        if isinstance(order, process_messages.Prepare):
            self._send(
                process_messages.TokenizedPrompt(id=order.id, prompt=_prepared(loaded, order))
            )
        elif isinstance(order, process_messages.Compare):
            count, wrong = compare(loaded.reader, order)
            self._send(process_messages.Comparison(id=order.id, compared=count, wrong=wrong))
        else:
            sequence = order.sequence
            constraint = loaded.grammars.constraint(sequence.grammar, sequence.ends)
            loaded.texts.add(sequence, constraint)
            if order.sequence.logprobs is not None:
                loaded.probed.add(order.sequence.id)

    def _version(self, model: process_messages.ModelFiles) -> LoadedVersion:
        loaded = self._loaded.get(model.key)
        if loaded is None:
            size = LOADING * Path(model.weights).stat().st_size
            while not self._memory.fits(size) and self._drop():
                pass
            try:
                loaded = _load(model, self._memory.device)
            except (MemoryError, RuntimeError) as error:
                if not _too_large(error) or not self._drop(all_idle=True):
                    raise
                loaded = _load(model, self._memory.device)
            self._loaded[model.key] = loaded
        self._loaded.move_to_end(model.key)
        return loaded

    def _drop(self, all_idle: bool = False) -> bool:
        """Unload the least recently used idle version, or all idle versions; return False if no
        version was idle.
        """
        idle = [key for key, loaded in self._loaded.items() if not len(loaded.texts)]
        for key in idle if all_idle else idle[:1]:
            del self._loaded[key]
        gc.collect()
        return bool(idle)

    def _images(self, order: process_messages.DrawPictures) -> tuple[bytes, ...]:
        if self._drawing is None or self._drawing[0] != order.model.key:
            self._drawing = None  # frees the memory of the earlier version first
            self._drawing = (order.model.key, DrawingVersion(order.model))
        return self._drawing[1].images(order.count, order.seed)

    def _send(self, event: process_messages.Event) -> None:
        self._server.sendall(process_messages.framed(event))


def compare(reader: Reader, order: process_messages.Compare) -> tuple[int, int]:
    """Return the number of compared tokens of an answer, and the number of wrong tokens among
    these. Of a long answer, COMPARED_MAX tokens at random are compared. In an answer that this
    version cannot have given, every token counts as wrong.
    """
    sequence, tokens = order.sequence, list(order.tokens)
    if order.ended and sequence.ends:
        tokens.append(sequence.ends[0])
    whole = [*sequence.prompt, *tokens]
    if len(whole) > reader.context + 1:
        return len(tokens), len(tokens)
    places = sorted(
        random.SystemRandom().sample(range(len(tokens)), min(len(tokens), COMPARED_MAX))
    )
    if not all(0 <= token < reader.vocabulary for token in tokens):
        return len(tokens), len(tokens)
    if not places:
        return 0, 0
    wrong = 0
    rows = reader.scores(whole[:-1], [len(sequence.prompt) + index - 1 for index in places])
    for index, logits in zip(places, rows, strict=True):
        draw = uniform(sequence.seed, sequence.place + index)
        options = {"temperature": sequence.temperature, "top_p": sequence.top_p}
        wrong += not agrees(logits, draw, tokens[index], **options)
    return len(places), wrong


def _prepared(loaded: LoadedVersion, order: process_messages.Prepare) -> PreparedPrompt:
    prompt = _tokenized(loaded, order)
    if order.rule is not None:
        grammar = loaded.grammars.of_rule(order.rule, prompt.calls)
        prompt = msgspec.structs.replace(prompt, grammar=grammar)
    if order.probe is None or not 1 < len(prompt.tokens) <= prompt.context:
        return prompt
    rows = loaded.reader.scores(prompt.tokens[:-1], range(len(prompt.tokens) - 1))
    first = TokenLogprob(data=loaded.reader.spelling(prompt.tokens[0]), logprob=None)
    more = [
        _probability(loaded, probed(row, token, order.probe))
        for row, token in zip(rows, prompt.tokens[1:], strict=True)
    ]
    return msgspec.structs.replace(prompt, logprobs=(first, *more))


def _tokenized(loaded: LoadedVersion, order: process_messages.Prepare) -> PreparedPrompt:
    reader, prompt = loaded.reader, order.prompt
    prompt_tokens = PreparedPrompt(
        tokens=(),
        context=reader.context,
        vocabulary=reader.vocabulary,
        ends=() if reader.end is None else (reader.end,),
    )
    if order.tokens:
        if max(order.tokens) >= reader.vocabulary:
            raise BadRequest(
                f"the prompt has the token {max(order.tokens)}, and the model {reader.vocabulary}"
            )
        text = reader.decode(order.tokens[: reader.context])
        return msgspec.structs.replace(prompt_tokens, tokens=order.tokens, text=text)
    if isinstance(prompt, str):
        check_length(len(prompt), reader.context)
        return msgspec.structs.replace(prompt_tokens, tokens=tuple(reader.encode(prompt)))
    chat = loaded.conversation
    return msgspec.structs.replace(
        prompt_tokens,
        tokens=chat.tokens(prompt),
        ends=tuple(dict.fromkeys((*chat.ends, *prompt_tokens.ends))),
        stop=chat.stop,
        calls=chat.calls if prompt.tools else None,
    )


def _piece(loaded: LoadedVersion, token: NextToken) -> AnswerPiece:
    """Return a generated token as a piece, with its log-probability if that was requested."""
    sample = token.chosen
    with_probability = token.id in loaded.probed
    if token.finish:
        loaded.probed.discard(token.id)
    return AnswerPiece(
        text=token.text,
        tokens=() if sample is None else (sample.token,),
        logprobs=(_probability(loaded, sample),) if sample is not None and with_probability else (),
        finish=token.finish,
    )


def _probability(loaded: LoadedVersion, sample: SampledToken) -> TokenLogprob:
    spelling = loaded.reader.spelling
    return TokenLogprob(
        data=spelling(sample.token),
        logprob=sample.logprob,
        top=tuple((spelling(token), value) for token, value in sample.top),
    )


def _failure(error: Exception) -> str:
    """Return the message for an order that fails by this error."""
    if _too_large(error):
        return "this version is too large for the memory that answers may take"
    return f"{type(error).__name__}: {error}"


def _too_large(error: Exception) -> bool:
    """Return True if an allocator refused memory: PyTorch's raises RuntimeError."""
    message = str(error)
    return isinstance(error, MemoryError) or "alloc" in message or "out of memory" in message


class DrawingVersion:
    """Loaded version that draws pictures."""

    def __init__(self, model: process_messages.ModelFiles) -> None:
        from coordinator.runs.definition import of_file
        from coordinator.runs.version_files import read_weights

        self._about = of_file(model.file)
        self._weights = read_weights(Path(model.weights), self._about)

    def images(self, count: int, seed: int) -> tuple[bytes, ...]:
        """Return PNG files. Raises BadRequest if the workload draws no images."""
        about = self._about
        drawn = [
            about.workload.sample(about.file.model, self._weights, None, "", seed + index)
            for index in range(count)
        ]
        if any(picture.kind != "png" for picture in drawn):
            raise BadRequest(f"runs of the workload {about.file.workload} draw no pictures")
        return tuple(picture.data for picture in drawn)


class VersionMemory:
    """Memory limit of the loaded versions, on the device that answers."""

    def __init__(self, bytes_max: int, device: str) -> None:
        self.device = device
        self.bytes_max = bytes_max or int(self._size() * MEMORY_SHARE)

    def limit(self) -> None:
        """Make the system refuse memory beyond the limit."""
        # CUDA's driver reserves more addresses than it uses, so a limit on the process's addresses
        # would stop it
        if self.device == "cuda":
            import torch

            torch.cuda.set_per_process_memory_fraction(min(1.0, self.bytes_max / self._size()))
            return
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (self.bytes_max, self.bytes_max))

    def fits(self, size: float) -> bool:
        """Return True if `size` more bytes fit."""
        return self._used() + size <= ROOM * self.bytes_max

    def _used(self) -> int:
        if self.device == "cuda":
            import torch

            return torch.cuda.memory_allocated()
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "data", memory.rss))

    def _size(self) -> int:
        if self.device == "cuda":
            import torch

            return torch.cuda.get_device_properties(0).total_memory
        return memory_bytes()


def _device(preference: str) -> str:
    """Return "cuda" or "cpu". Ends the process if "cuda" is wanted and there is no GPU."""
    import torch

    has_gpu = torch.cuda.is_available()
    if preference == "cuda" and not has_gpu:
        sys.exit("inference_device is cuda, and PyTorch finds no GPU: set it to cpu, or to auto")
    return "cuda" if has_gpu and preference != "cpu" else "cpu"


def _load(model: process_messages.ModelFiles, device: str) -> LoadedVersion:
    from coordinator.runs.definition import of_file
    from coordinator.runs.version_files import read_weights

    about = of_file(model.file)
    workload, config = about.workload, about.file.model
    tokenizer = None if model.tokenizer is None else Path(model.tokenizer).read_bytes()
    files = {name: Path(path) for name, path in model.files.items()}
    weights = workload.whole(config, read_weights(Path(model.weights), about), files)
    decoder = workload.decoder(config, weights, tokenizer, SLOTS, device)
    if decoder is None:
        raise BadRequest(f"runs of the workload {about.file.workload} do not answer prompts")
    return LoadedVersion(decoder, Batch(decoder), model.template)


class Conversation:
    """Formats conversations by the chat template with which a model was trained."""

    def __init__(self, template: Path, reader: Reader) -> None:
        """Read a template as a dataset stores it. Raises InvalidRunFile if that is impossible."""
        self._reader = reader
        self._template = decode(template.read_bytes(), ChatTemplate)
        frame = self._template.frame()
        self._end = frame.end if frame is not None else self._template.eos_token
        self.ends, self.stop = ending(reader, self._end)  # tokens and texts that end an answer

    @cached_property
    def calls(self) -> ToolCallForm | None:
        """Return the form of calls in answers; None for a template that writes no calls here."""
        form = ToolCallForm.of(self._template, self._end)
        if form is None or not form.before:
            return form
        mark = self._reader.decode(self._reader.encode(form.before, marks=True))
        return msgspec.structs.replace(form, mark=mark)

    def tokens(self, prompt: ChatPrompt) -> tuple[int, ...]:
        """Return turns as tokens, up to the beginning of the answer. Raises BadRequest for turns
        that are too long or refused by the template, and InvalidField for functions and calls that
        the template does not write.
        """
        turns = prompt.turns
        check_length(sum(len(turn.content) for turn in turns), self._reader.context)
        if prompt.tools and ("tools" not in self._template.supported or self.calls is None):
            raise InvalidField(NO_TOOLS, "tools")
        has_calls = any(turn.tool_calls or turn.role == "tool" for turn in turns)
        if has_calls and not self._template.supported >= {"tool", "tool_calls"}:
            raise InvalidField(NO_TOOLS, "messages")
        text = self._template.prompt_text(turns, prompt.tools, prompt.options)
        check_length(len(text), self._reader.context)
        return tuple(self._reader.encode(text, marks=True))


def main(descriptor: str, threads: str, memory_bytes: str, preference: str) -> None:
    """Serve the socket with file descriptor `descriptor`; the other arguments are the process's
    limits and device.
    """
    if preference == "cpu":
        # otherwise libraries take memory on an unused GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with gc_freeze.long_lived():
        import torch

    yield_to_server(NICENESS, OOM_SCORE)
    torch.set_num_threads(int(threads))
    memory = VersionMemory(int(memory_bytes), _device(preference))
    memory.limit()
    InferenceProcess(socket.socket(fileno=int(descriptor)), memory).run()


if __name__ == "__main__":
    main(*sys.argv[1:])

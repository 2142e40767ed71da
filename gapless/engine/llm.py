"""LLM: the whole engine in the caller's process and thread, for scripts and notebooks."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from time import monotonic_ns
from types import FrameType
from typing import Any, Self, TypeVar, cast

from gapless.base.config import DEMO_MODEL
from gapless.base.errors import EngineDeadError, EngineError, GaplessError, QueueFullError, RequestError
from gapless.base.params import SamplingParams
from gapless.base.spellings import METHODS, did_you_mean
from gapless.engine.arguments import make_config, one_engine
from gapless.engine.async_llm import chat_prompt
from gapless.engine.build import build_core
from gapless.engine.frontdoor import ModelAssets, locate, open_assets
from gapless.engine.inputs import PromptInput, Resolved, Resolver, check_adapter
from gapless.engine.open_request import OpenRequest
from gapless.engine.outputs import RequestOutput, taken_apart
from gapless.engine.progress import progress
from gapless.engine.seam import Core, EngineInfo, OperatorOrder
from gapless.engine.stats import Stats
from gapless.engine.trace import KEPT_REQUESTS, Recording
from gapless.engine.tracker import Tracker
from gapless.text.replies import ReplyForms
from gapless.text.tokenizer import Tokenizer
from gapless.text.tools import check_tools, formed

ChatMessage = Mapping[str, Any]
T = TypeVar("T")


class LLM:
    """A language model.

        with LLM("demo") as llm:
            for output in llm.generate(["1 + 1 =", "2 + 2 ="], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    `model` is a directory, or a hub name, which is fetched if the cache lacks it. Keyword arguments are the fields of
    EngineConfig. `tool_call_parser` and `reasoning_parser` name the form of the model's calls and reasoning, for
    `chat`; the default is the template's. `close`, or leaving the `with` block, frees the memory. Raises ConfigError
    and CheckpointError for the caller's mistakes, ServerError if the hub cannot be reached.
    """

    def __init__(
        self,
        model: str = DEMO_MODEL,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        core: Core | None = None,  # this and the next are for tests
        front: ModelAssets | None = None,
        **options: Any,
    ) -> None:
        config, commit = locate(one_engine(make_config(model, options)))
        self._front = front or open_assets(config, commit)
        self._core: Core | None = core or build_core(config)
        self.resolver = Resolver(self._front, self._core.info, config.base_seed)
        self._tracker = Tracker(self._front.tokenizer, lambda key: self._up().abort(key))
        self._parsers = (tool_call_parser, reasoning_parser)
        self._turn = threading.Lock()
        self._names = map(str, itertools.count(1))

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str] = "",
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the results are in the order of the prompts.

        A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. Sampling parameters are one for all,
        or a list as long as the prompts, or the model's own defaults. `adapter` is a name of `lora_modules`, or a list
        of names, an empty one for the model alone; `lora_request` is vLLM's, read for its name. Every request is
        checked before the first one runs: RequestError. `use_tqdm` shows progress if standard error is a terminal.
        """
        listed = _as_prompts(prompts)
        params = self._params(sampling_params, len(listed))
        ranks = _one_each(0 if priority is None else priority, len(listed), "priorities", "priority")
        adapters: list[str] = _one_each(adapter_names(adapter, lora_request), len(listed), "adapters", "adapter")
        resolved: list[Resolved] = []
        for prompt, one, rank, name in zip(listed, params, ranks, adapters, strict=True):
            with _naming_prompt(len(resolved), len(listed)):
                check_adapter(name, self.info.adapters)
                resolved.append(self.resolver.resolve(prompt, one, priority=rank, adapter=name))
        bar = progress("prompts", len(resolved), use_tqdm and sys.stderr.isatty())
        with self._turn, bar as advance, _deferred_interrupt() as check:
            return self._run(resolved, advance, check)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str] = "",
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations, in their order.

        `tools` and `tool_choice` are as in OpenAI's API; the outputs have `reasoning`, `content` and `tool_calls` as
        well as text. A form of output begins after the reasoning.
        """
        use = check_tools(tools, tool_choice, parallel_tool_calls)
        if not isinstance(messages, Sequence):
            raise RequestError("messages must be a list of messages, or a list of such lists", "messages")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            chat_prompt(
                self.resolver,
                conversation,
                tools=use.tools or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        given = self._params(sampling_params, len(prompts))
        params: list[SamplingParams] = []
        begun = [self._replies.begun(prompt["last_words"]) for prompt in prompts]
        for text, one in zip(begun, given, strict=True):
            with _naming_prompt(len(params), len(prompts)):
                params.append(formed(one, use, self._replies, text))
        outputs = self.generate(prompts, params, use_tqdm, adapter=adapter, lora_request=lora_request)
        reply = self._replies.format(tools=bool(use.tools))
        return [taken_apart(output, reply, use, text) for output, text in zip(outputs, begun, strict=True)]

    def update_weights(self, path: str) -> None:
        """Replace the model's weights by a directory's, of the same architecture. KV of the old weights is used no
        more. Raises RequestError for a refusal, which changes nothing."""
        core, answers = self._up(), list[GaplessError | None]()
        with self._turn:
            core.update_weights(path, answers.append)
            while not answers:
                self._step(core)
        if answers[0] is not None:
            raise answers[0]

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache on the device and in the host tier: no request finds an earlier page. Tiers below and
        peers keep theirs. Returns True: it always succeeds."""
        with self._turn:
            self._up().obey(OperatorOrder.FORGET, lambda error: None)
        return True

    @cached_property
    def _replies(self) -> ReplyForms:
        return ReplyForms(self._front.tokenizer, *self._parsers)

    def get_tokenizer(self) -> Tokenizer:
        return self._front.tokenizer

    def get_default_sampling_params(self, **otherwise: Any) -> SamplingParams:
        """Return the parameters recommended by the model's generation_config.json, `otherwise` for the rest."""
        return SamplingParams(**{**otherwise, **self._front.defaults})

    @property
    def info(self) -> EngineInfo:
        return self._up().info

    def stats(self) -> Stats:
        return self._up().stats()

    def recording(self) -> Recording:
        """The latest steps (4,096 at most) and requests, for gapless.lab.trace and gapless.engine.trace."""
        return Recording(self._up().steps_after(0), self._tracker.latest(KEPT_REQUESTS))

    def close(self) -> None:
        """Free the model's memory and threads. Harmless if closed."""
        core, self._core = self._core, None
        if core is not None:
            core.close()
            del core
            gc.collect()  # its parts refer to each other, and the model's memory is theirs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        why = METHODS.get(name)
        raise AttributeError(f"LLM has no {name!r}" + (f": {why}" if why else did_you_mean(name, dir(type(self)))))

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        asked = self.get_default_sampling_params() if given is None else given
        return _one_each(asked, count, "sampling_params", "sampling_params")

    def _run(
        self, resolved: Sequence[Resolved], advance: Callable[[int], None], check: Callable[[], None]
    ) -> list[RequestOutput]:
        """Submit up to the queue's limit, step, and repeat until all have ended."""
        core = self._up()
        requests = [OpenRequest(next(self._names), one, self._front.tokenizer, monotonic_ns()) for one in resolved]
        for request in requests:
            self._tracker.open(request)
        waiting = deque(child for one in resolved for child in one.requests)
        try:
            while self._tracker.requests:
                with suppress(QueueFullError):
                    while waiting:
                        core.submit(waiting[0])
                        waiting.popleft()
                for key, error in self._step(core):
                    index = next(i for i, one in enumerate(resolved) if key in [child.key for child in one.requests])
                    with _naming_prompt(index, len(resolved)):
                        raise error
                advance(len(requests) - len(self._tracker.requests))
                check()
        except BaseException as error:
            self._abandon(core, alive=not isinstance(error, EngineError))
            raise
        return [request.snapshot() for request in requests]

    def _step(self, core: Core) -> Sequence[tuple[int, GaplessError]]:
        """Run a step, and hand out its results. Returns the failed requests."""
        assert core.has_work(), "requests are open, but the core has nothing to do"
        started, settled, failed = core.step()
        for key, cached in started:
            self._tracker.on_started(key, cached)
        self._tracker.on_tokens(*settled)
        return failed

    def _abandon(self, core: Core, alive: bool) -> None:
        """Abort open requests and let their steps run out, so that the next call finds a quiet engine."""
        for request_id in list(self._tracker.requests):
            self._tracker.abort(request_id)
        while alive and core.has_work():
            self._step(core)

    def _up(self) -> Core:
        if self._core is None:
            raise EngineDeadError("this LLM is closed")
        return self._core


def adapter_names(adapter: str | Sequence[str], lora_request: Any) -> str | Sequence[str]:
    """Return the names of adapters, from names or vLLM's LoRARequests. Raises RequestError."""
    if lora_request is None:
        return adapter
    if adapter:
        raise RequestError("give adapter or lora_request, not both", "lora_request")
    if isinstance(lora_request, (list, tuple)):
        return [cast(str, adapter_names("", one)) for one in lora_request]
    name = getattr(lora_request, "lora_name", None)
    if not isinstance(name, str):
        raise RequestError("lora_request must have a lora_name, as vLLM's has; or give adapter=NAME", "lora_request")
    return name


def _one_each(given: T | Sequence[T], count: int, what: str, field: str) -> list[T]:
    """Return each prompt's own value: the single one, or its item of a sequence."""
    one = isinstance(given, (str, int, SamplingParams))
    each = [cast("T", given)] * count if one else list(cast("Sequence[T]", given))
    if len(each) != count:
        raise RequestError(f"{count} prompts need as many {what}, got {len(each)}", field)
    return each


@contextmanager
def _naming_prompt(index: int, count: int) -> Iterator[None]:
    """Put the prompt's number into its error."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"prompts[{index}]: {error}", error.param, error.code) from error


def _as_prompts(prompts: Any) -> list[PromptInput]:
    """Return a list of prompts. A string, an object and a list of whole numbers are one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError("prompts must be a string, a list of token ids, an object, or a list of these", "prompts")
    one = len(prompts) > 0 and isinstance(prompts[0], int)
    return [prompts] if one else list(prompts)


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C to the end of a step, when the yielded function raises it; a second one is not deferred."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""A whole server in this process: uvicorn on a free port, the app, AsyncLLM, and a core that plays a script."""

import asyncio
import json
import re
import threading
import time
from contextlib import contextmanager

import httpx
from form_core import FormCore
from tiny_models import tiny_config
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from waiting import until

from gapless.base.records import CAUSES
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.frontdoor import ModelAssets
from gapless.engine.thread_backend import ThreadBackend
from gapless.server.app import App
from gapless.server.config import ServerConfig
from gapless.server.run import UvicornServer, listen, uvicorn_config
from gapless.testing.core import FakeCore
from gapless.text.chat import ChatTemplate
from gapless.text.tokenizer import Tokenizer
from gapless.text.tokens import BYTE_OF

MODEL = "tiny"
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TEXT_ROUTES = (COMPLETIONS, CHAT)
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": HI},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"model": MODEL, "max_tokens": 9, "messages": HI},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": []},
}
"""The least that each route takes"""
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}hm {% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }} {% endif %}{% endif %}"
)


def idle(**causes):
    """Idle times of DeviceTimes."""
    assert set(causes) <= set(CAUSES)
    return {cause: causes.get(cause, 0) for cause in CAUSES}


def backend():
    """One token a byte, and two special tokens."""
    vocab = {token: i for i, token in enumerate(sorted(BYTE_OF))}
    made = Backend(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return made


def tokenizer(template=TEMPLATE, marks=()):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    made = backend()
    made.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return Tokenizer(made, special=special, template=ChatTemplate(template, special) if template else None)


TOKENS, MARKED = tokenizer(), tokenizer(marks=("<think>", "</think>"))
"""Without tokens that begin and end reasoning, and with them"""
VOCAB = TOKENS.vocab_size


CONFIG = tiny_config(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=1024,
)  # fmt: skip


def write_model(directory):
    """A model directory without weights: all that the front needs."""
    backend().save(str(directory / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


GO_ON = threading.Event()
"""A row that fails in the middle of its stream waits for this, which a test clears until it has read enough."""
GO_ON.set()


def script(request, count):
    """The alphabet over and over; marks in the prompt ask for something else.

    '~' takes 2 ms a token, '!' has logits that are not finite at its third token, '$' ends after 3 tokens, and '+'
    gives letters of two bytes.
    """
    prompt = TOKENS.decode(request.tokens.tolist())
    if "~" in prompt:
        time.sleep(0.002)
    if "!" in prompt and count == 2:
        GO_ON.wait(20)
        return -1
    if "$" in prompt and count == 3:
        return TOKENS.eos_token_id
    text = "äöü" if "+" in prompt else ALPHABET
    data = text.encode()
    return TOKENS.encode(text)[count % len(data)]


def said(request, count):
    """What the prompt has between SAY[ and ]SAY, then the end; else the alphabet, of which '!' fails at the 40th."""
    prompt = MARKED.decode(request.tokens.tolist())
    asked = re.findall(r"SAY\[(.*?)\]SAY", prompt, re.DOTALL)
    if not asked:
        if "!" in prompt and count == 40:
            GO_ON.wait(20)
            return -1
        return MARKED.encode(ALPHABET[count % 26])[0]
    ids = MARKED.encode(asked[-1])
    return ids[count] if count < len(ids) else MARKED.eos_token_id


def broken_off(client, path, body, until='"a?b"'):
    """The text of a stream whose row fails once the client has read what matches `until`: two tokens, if not named."""
    GO_ON.clear()
    try:
        with client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            pieces, text = response.iter_text(), ""
            while not re.search(until, text):
                text += next(pieces)
            GO_ON.set()
            return text + "".join(pieces)
    finally:
        GO_ON.set()


def fake_core(**options):
    return FakeCore(VOCAB, script=script, **options)


def listening_core(hear):
    """Return a maker of fake cores that call `hear` with every request."""

    def make():
        made = fake_core()
        submit = made.submit
        made.submit = lambda request: (hear(request), submit(request))
        return made

    return make


class Server:
    """What a test sees of a running server."""

    def __init__(self, config, core, front, wait, engine=None):
        self._wait = wait
        self.config = config
        self.engine = engine
        self._core = core
        self._model = front
        self._up = threading.Event()
        self._stop = None
        self._error = None
        self._thread = threading.Thread(target=self._run, name="server")

    def start(self):
        self._thread.start()
        assert self._up.wait(20)
        if self._error:
            raise self._error

    def stop(self):
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self):
        try:
            asyncio.run(self._main())
        except Exception as error:
            self._error = error
            self._up.set()

    async def _main(self):
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.llm = AsyncLLM(ThreadBackend(self._build), self._model, config=self.engine)
        self.app = App(self.llm, self.config, MODEL)
        self.state = self.app.state
        with listen(self.config) as listener:
            self.port = listener.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            self.front = front = UvicornServer(uvicorn_config(self.app, self.config))
            serving = asyncio.create_task(front.serve([listener]))
            if not self._wait:
                self._up.set()
            await self.llm.start()
            self._up.set()
            await self._stop.wait()
            self.state.close()
            front.should_exit = True
            await serving
            await self.llm.close()

    def _build(self):
        self.core = self._core()
        return self.core

    def run(self, work):
        """Run a function of no arguments on the server's loop."""

        async def call():
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def stats(self):
        return self.run(self.llm.stats)

    def until(self, truth):
        until(truth)

    def client(self, **options):
        return httpx.Client(base_url=self.url, timeout=20, **options)


@contextmanager
def serving(config=None, core=fake_core, front=None, wait=True, engine=None, **settings):
    """A server of this core, with these settings of ServerConfig."""
    front = front or ModelAssets(TOKENS, (TOKENS.eos_token_id,), {})
    config = config or ServerConfig(port=0, disable_uvicorn_access_log=True, **settings)
    server = Server(config, core, front, wait, engine)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def serving_forms(reasoning="none", plain=said, tokens=MARKED, **settings):
    """A server whose core honours forms of output, and whose replies may have calls, as hermes writes them."""
    front = ModelAssets(tokens, (tokens.eos_token_id,), {})
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": reasoning}
    return serving(core=lambda: FormCore(tokens, plain), front=front, **parsers, **settings)


def posted(path, body, *headers, version="1.1"):
    """The bytes of a request, for a socket."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "host: x", "content-type: application/json"]
    lines += [f"content-length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def events(response):
    """The data of each server-sent event of an httpx response; the last must be [DONE]."""
    data = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert "data: " not in data[0]
    return [json.loads(item) for item in data[:-1]]


def error_of(response):
    """The error of an answer, after a look at its shape and for what must never be in one."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert len(response.content) < 4096
    for leak in ("Traceback", "/gapless/", "site-packages", ".py", "0x"):
        assert leak not in response.text
    return body["error"]

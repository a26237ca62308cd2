"""On-policy answers from servers that already run: vLLM, SGLang, llama-server, or any OpenAI-compatible one.

The prompt goes out as token ids and the answer comes back as token ids, so a document is exactly what the target read
and wrote. A server that only speaks text gets messages; its answers are tokenised once and their rows are marked.
"""

import asyncio
import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from eyas.data.generate import Document, Journal, Limits, Sampling, end_turn, prepare
from eyas.data.template import ChatTemplate
from eyas.errors import EyasError, UsageError
from eyas.files import fingerprint
from eyas.progress import progress
from eyas.target import Target

RETRY_FIRST, RETRY_MOST = 0.5, 30.0  # seconds between two tries of a server that fails
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclass
class Reply:
    """One answer. `ids` is None where the server gave text only; `stopped` when the target ended it by itself."""

    ids: list[int] | None
    stopped: bool
    text: str = ""


@dataclass(frozen=True)
class Protocol:
    """How to ask one kind of server: where, with what body, and what its JSON means."""

    path: str
    body: Callable[..., dict[str, Any]]
    reply: Callable[[dict[str, Any]], Reply]
    sign: str | None = None  # an address that only this kind of server answers with JSON


def _common(document: Document, model: str, room: int, sampling: Sampling) -> dict[str, Any]:
    seed = _seed(document, sampling)
    return {"model": model, "max_tokens": room, "temperature": sampling.temperature, "seed": seed}


def _vllm_body(document: Document, model: str, room: int, ends: list[int], sampling: Sampling) -> dict[str, Any]:
    own = {"prompt": document.tokens, "stop_token_ids": ends, "return_token_ids": True}
    return _common(document, model, room, sampling) | own


def _vllm_reply(value: dict[str, Any]) -> Reply:
    choice = value["choices"][0]
    if choice.get("token_ids") is None:
        raise KeyError("choices[0].token_ids (return_token_ids needs vLLM 0.10.2 or later)")
    return Reply(choice["token_ids"], choice["finish_reason"] == "stop")


def _sglang_body(document: Document, model: str, room: int, ends: list[int], sampling: Sampling) -> dict[str, Any]:
    options = {"max_new_tokens": room, "temperature": sampling.temperature, "stop_token_ids": ends}
    if sampling.temperature:
        options["sampling_seed"] = _seed(document, sampling)
    return {"input_ids": document.tokens, "sampling_params": options}


def _sglang_reply(value: dict[str, Any]) -> Reply:
    return Reply(value["output_ids"], value["meta_info"]["finish_reason"]["type"] == "stop")


def _llamacpp_body(document: Document, model: str, room: int, ends: list[int], sampling: Sampling) -> dict[str, Any]:
    body = {"prompt": document.tokens, "n_predict": room, "return_tokens": True, "cache_prompt": False}
    if not sampling.temperature:
        return body | {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"]}
    own = {"temperature": sampling.temperature, "samplers": ["temperature"]}
    return body | own | {"seed": _seed(document, sampling)}


def _llamacpp_reply(value: dict[str, Any]) -> Reply:
    return Reply(value["tokens"], value["stop_type"] in ("eos", "word"))


def _openai_body(document: Document, model: str, room: int, ends: list[int], sampling: Sampling) -> dict[str, Any]:
    return _common(document, model, room, sampling) | {"messages": document.messages}


def _openai_reply(value: dict[str, Any]) -> Reply:
    choice = value["choices"][0]
    return Reply(None, choice["finish_reason"] == "stop", choice["message"]["content"] or "")


def _seed(document: Document, sampling: Sampling) -> int:
    return int(fingerprint([sampling.seed, document.conversation["id"], len(document.spans)])[:7], 16)


PROTOCOLS = {
    "sglang": Protocol("/generate", _sglang_body, _sglang_reply, "/get_model_info"),
    "llamacpp": Protocol("/completion", _llamacpp_body, _llamacpp_reply, "/props"),
    "vllm": Protocol("/v1/completions", _vllm_body, _vllm_reply, "/version"),
    "openai": Protocol("/v1/chat/completions", _openai_body, _openai_reply),
}
Kind = Literal["auto", "vllm", "sglang", "llamacpp", "openai"]


@dataclass
class Server:
    url: str
    kind: str = ""
    model: str = ""
    failures: int = 0  # in a row
    counts: Counter[str] = field(default_factory=Counter)


def generate_from_servers(
    conversations: list[dict[str, Any]],
    target: Target,
    template: ChatTemplate,
    urls: list[str],
    out: str | Path,
    *,
    kind: Kind = "auto",
    concurrency: int = 32,
    max_new_tokens: int = 256,
    max_length: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    on_long: Literal["error", "skip"] = "error",
    timeout: float = 600.0,
    patience: float = 300.0,
    api_key: str | None = None,
) -> dict[str, Any]:
    """As `eyas.data.generate.generate`, with the answers written by servers of the same target.

    Each server has at most `concurrency` requests at a time and one failure does not end anything: the conversation
    goes back to the others, the server is asked again after a growing pause. When every server has failed for
    `patience` seconds the job ends with what is finished kept. The whole of a conversation's earlier turns goes out
    again with each turn, so its turns may be answered by different servers of the same target.

    Figures as there, with servers [{url, kind, requests, failures, answers}] and from_text: documents whose ids were
    made from text, which are marked `"ids_from": "text"`; `"end_token": "assumed"` marks a document where a server
    said that an answer ended by itself, did not give its end token, and the target has several.
    Raises UsageError for bad settings or a request that a server refuses, EyasError when all servers fail.
    """
    if not urls or concurrency < 1 or max_new_tokens < 1 or temperature < 0:
        raise UsageError(
            f"generate: servers={urls}, concurrency={concurrency}, max_new_tokens={max_new_tokens}, "
            f"temperature={temperature}. Expected at least one server, 1, 1 and 0."
        )
    out, length = Path(out), min(target.max_positions, max_length or target.max_positions)
    limits = Limits(max_new_tokens, length, frozenset(template.end_ids))
    settings = {
        "target": target.fingerprint,
        "template": [template.text, template.options],
        "limits": [max_new_tokens, length],
        "servers": kind,
        "sampling": [temperature, seed] if temperature else None,
    }
    documents, skipped = prepare(conversations, template, limits, fingerprint(settings), on_long)
    begin = time.monotonic()
    with Journal(out, {document.key for document in documents}) as journal:
        todo, resumed = journal.todo(documents, max_new_tokens), len(journal.lines)
        job = _Job(deque(todo), len(todo), journal, template, limits, Sampling(temperature, seed), patience)
        servers = [Server(url.rstrip("/")) for url in urls]
        with progress("generate", len(documents), "documents", done=resumed) as job.advance:
            if todo:
                asyncio.run(job.run(servers, kind, concurrency, timeout, api_key))
        from_text = sum(b'"ids_from"' in line and "ids_from" in json.loads(line) for line in journal.lines.values())
        figures = journal.finish(documents, time.monotonic() - begin, job.written)
    return figures | {
        "skipped": skipped,
        "resumed": resumed,
        "engine": ", ".join(sorted({server.kind for server in servers} - {""})),
        "from_text": from_text,
        "servers": [{"url": server.url, "kind": server.kind, **server.counts} for server in servers],
    }


@dataclass
class _Job:
    waiting: deque[Document]
    left: int
    journal: Journal
    template: ChatTemplate
    limits: Limits
    sampling: Sampling
    patience: float
    written: int = 0
    last_success: float = field(default_factory=time.monotonic)
    advance: Callable[..., None] = lambda *_: None

    async def run(
        self, servers: list[Server], kind: str, concurrency: int, timeout: float, api_key: str | None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=10), headers=headers, limits=limits
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for server in servers:
                        group.create_task(self._serve(client, server, kind, concurrency))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _serve(self, client: "httpx.AsyncClient", server: Server, kind: str, concurrency: int) -> None:
        """Keep one server busy until no document is left. While it fails, one request after the other tries it."""
        running: set[asyncio.Task[None]] = set()
        try:
            while self.left:
                if not server.kind or server.failures:
                    await self._pause(server)
                if not server.kind and not await self._recognise(client, server, kind):
                    continue
                room = 1 if server.failures else concurrency
                while self.waiting and len(running) < room:
                    running.add(asyncio.create_task(self._converse(client, server, self.waiting.popleft())))
                if running:
                    done, running = await asyncio.wait(running, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                else:
                    await asyncio.sleep(0.05)  # other servers hold the rest; one of them may fail and give it back
        finally:
            for task in running:
                task.cancel()

    async def _pause(self, server: Server) -> None:
        if time.monotonic() - self.last_success > self.patience:
            raise EyasError(
                f"{server.url}: no server has answered for {self.patience:.0f} s. {len(self.journal.lines)} finished "
                f"documents are kept in {self.journal.part}; start the servers and run the same command again."
            )
        if server.failures:
            pause = min(RETRY_MOST, RETRY_FIRST * 2 ** min(server.failures - 1, 10))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _recognise(self, client: "httpx.AsyncClient", server: Server, kind: str) -> bool:
        """Find out what kind of server this is and what it calls its model."""
        try:
            if kind == "auto":
                found = [
                    name
                    for name, p in PROTOCOLS.items()
                    if p.sign and await self._get(client, server, p.sign) is not None
                ]
                kind = found[0] if found else "openai"
            models = await self._get(client, server, "/v1/models")
            if models is None and kind in ("vllm", "openai"):
                raise UsageError(f"{server.url}: does not answer /v1/models. Expected the address of a running server.")
            server.model = ((models or {}).get("data") or [{}])[0].get("id", "")
        except httpx.TransportError:
            server.failures += 1
            server.counts["failures"] += 1
            return False
        server.kind, server.failures = kind, 0
        return True

    async def _get(self, client: "httpx.AsyncClient", server: Server, path: str) -> dict[str, Any] | None:
        answer = await client.get(server.url + path, timeout=30)
        try:
            value = answer.json() if answer.status_code == 200 else None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    async def _converse(self, client: "httpx.AsyncClient", server: Server, document: Document) -> None:
        """Take one conversation as far as this server goes; it is given back where it failed."""
        try:
            while not document.done:
                self._write(document, await self._ask(client, server, document))
                server.failures, self.last_success = 0, time.monotonic()
        except (httpx.TransportError, _Transient):
            server.failures += 1
            server.counts["failures"] += 1
            self.waiting.appendleft(document)
            return
        self.journal.add(document)
        self.left -= 1
        self.advance(1, f"{self.written} tokens")

    async def _ask(self, client: "httpx.AsyncClient", server: Server, document: Document) -> Reply:
        protocol = PROTOCOLS[server.kind]
        room = min(self.limits.max_new_tokens, self.limits.length - len(document.tokens))
        body = protocol.body(document, server.model, room, sorted(self.limits.end_ids), self.sampling)
        server.counts["requests"] += 1
        answer = await client.post(server.url + protocol.path, json=body)
        if answer.status_code in TRANSIENT:
            raise _Transient
        said = " ".join(answer.text.split())[:200]
        if answer.status_code != 200:
            raise UsageError(
                f"{server.url}{protocol.path}: refused conversation {document.conversation['id']!r} with "
                f"{answer.status_code} ({said}). Check that it is a {server.kind} server of this target."
            )
        try:
            reply = protocol.reply(answer.json())
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UsageError(
                f"{server.url}{protocol.path}: its answer lacks {error} ({said}). Expected a {server.kind} server."
            ) from None
        server.counts["answers"] += 1
        return reply

    def _write(self, document: Document, reply: Reply) -> None:
        """Append an answer to its document and go on with the next turn, or end the document."""
        ids = reply.ids
        if ids is None:
            ids = self.template.encode(reply.text)
            document.marks["ids_from"] = "text"
        room = min(self.limits.max_new_tokens, self.limits.length - len(document.tokens))
        end = next((i + 1 for i, token in enumerate(ids) if token in self.limits.end_ids), None)
        ids = ids[: min(end or room, room)]
        stopped = bool(ids) and ids[-1] in self.limits.end_ids
        if reply.stopped and not stopped and len(ids) < room:  # it ended, and the engine kept the end token to itself
            ids.append(self.template.turn_end())
            stopped = True
            if len(self.limits.end_ids) > 1 and reply.ids is not None:
                document.marks["end_token"] = "assumed"
        if not ids:
            raise EyasError(
                f"generate: conversation {document.conversation['id']!r} got an empty answer without an end token. "
                "The server and the target do not agree on what ends an answer."
            )
        document.tokens += ids
        self.written += len(ids)
        end_turn(document, stopped, len(document.tokens) >= self.limits.length, self.template, self.limits)


class _Transient(Exception):
    """A server said that it cannot answer now."""

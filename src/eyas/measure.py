"""Acceptance and speed of a live server, read from where each engine keeps them, under a set-up that can be trusted.

vLLM: Prometheus counters before and after. SGLang: `meta_info` of each answer, settings from /server_info.
llama-server: `timings` of each answer, which tell drafted and accepted but not per position. Prompts go out as token
ids of the target's own chat template, so the draft meets what it was trained on.
"""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from eyas.data.generate import Document, Limits, Sampling, end_turn, prepare
from eyas.data.prompts import Prompts, read_prompts
from eyas.data.servers import PROTOCOLS, TRANSIENT
from eyas.data.template import ChatTemplate
from eyas.errors import EyasError, UsageError
from eyas.progress import progress
from eyas.target import load_tokenizer, read_target

Json = dict[str, Any]
FEWEST = 8  # prompts below which a figure says nothing
WARM = 0.1  # share of prompt tokens that may come from a cache beyond what these prompts share among themselves
CLEAR = {
    "vllm": "restart the server (or start it with --no-enable-prefix-caching)",
    "sglang": "POST /flush_cache (or start the server with --disable-radix-cache)",
    "llamacpp": "restart the server",
}
NO_ROUNDS = (
    "does not tell its rounds. Say how many tokens it drafts (--k, its --spec-draft-n-max), or start it with --metrics."
)


@dataclass
class Asked:
    """One request: prompt and answer ids, and the server's JSON."""

    prompt: list[int]
    ids: list[int]
    value: Json


@dataclass
class Counts:
    """What the engine counted. per_position is empty and cached None where it does not tell."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[float] = field(default_factory=list)
    cached: int | None = None


@dataclass
class Served:
    """One server's part: what was asked, the documents written, counters before and after, seconds of the whole."""

    url: str
    asked: list[Asked]
    documents: list[Document]
    before: dict[str, float]
    after: dict[str, float]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(one.ids) for one in self.asked)

    def change(self, name: str) -> float:
        return self.after.get(name, 0.0) - self.before.get(name, 0.0)


def measure(
    engine: str,
    url: str,
    prompts: str | Path,
    *,
    target: str | None = None,
    draft: str | Path | None = None,
    plain_url: str | None = None,
    k: int | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    limit: int | None = None,
    concurrency: int = 8,
) -> Json:
    """Send the prompts to a server of `engine` (vllm, sglang, llamacpp) and return the figures of the JSON contract.

    `target` names the tokenizer's folder where the server does not; `draft` tells which prompts it was trained on;
    `plain_url` is a server of the same engine without speculation, for the speed-up and the comparison of texts.
    Raises UsageError for set-ups whose figures would mislead: fewer than 8 prompts, prompts from the training set, a
    target without a chat template, a warm prefix cache, a server that ignores end tokens or has other clients, another
    K than said; EyasError when a server fails or does not speculate.
    """
    if engine not in CLEAR:
        raise UsageError(f"--engine {engine}: expected vllm, sglang or llamacpp.")
    url, plain_url = url.rstrip("/"), plain_url and plain_url.rstrip("/")
    info = asyncio.run(_describe(engine, url))
    name = target or info.get("model_path")
    if not name or str(name).endswith(".gguf"):
        raise UsageError(f"{url}: does not say which Hugging Face target it serves. Name it with --target.")
    known = read_target(name)
    template = ChatTemplate(load_tokenizer(known))  # refuses a target without a chat template: no raw completions
    found = read_prompts(prompts, limit, draft or info.get("speculative_draft_model_path"))
    _refuse_prompts(found, str(prompts))
    limits = Limits(max_new_tokens, known.max_positions, frozenset(template.end_ids))
    job = _Job(engine, template, limits, Sampling(temperature, 0), concurrency, k)

    served = asyncio.run(job.serve(url, found, info))
    counts = COUNTERS[engine](served, k)
    if not counts.rounds or not counts.drafted:
        text = "tokens were written and none was drafted. Was it started with speculation, and with its statistics on?"
        raise EyasError(f"{url}: {served.tokens:,} {text}")
    settings = _settings(engine, info, counts, k, url)
    notes = _check(job, served, counts)
    if found.trained is None:
        notes.append("prompts of the training set (--draft)")
    speed, same = {"speculative": served.tokens / served.seconds}, None
    if plain_url:
        plain = asyncio.run(job.serve(plain_url, found, asyncio.run(_describe(engine, plain_url))))
        others = COUNTERS[engine](plain, k)
        if others.drafted:
            raise UsageError(f"{plain_url}: drafts tokens too. --plain-url is a server without speculation.")
        _check(job, plain, others)
        speed["plain"] = plain.tokens / plain.seconds
        if not temperature:
            pairs = zip(served.documents, plain.documents, strict=True)
            same = sum(one.tokens == other.tokens for one, other in pairs)
    said = {"temperature": temperature, "loaded_as": engine, "prompts": len(found.rows), "tokens": served.tokens}
    return {
        "tau": 1 + counts.accepted / counts.rounds,
        "accept_rate": counts.accepted / counts.drafted,
        "per_position": counts.per_position,
        "protocol": settings | said | {"data": found.data, "concurrency": concurrency},
        "speedup": speed["speculative"] / speed["plain"] if plain_url else None,
        "lossless": None if same is None else same == len(served.documents),
        "same_texts": same,
        "rounds": counts.rounds,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "tokens_per_s": speed,
        "cached_prompt_tokens": counts.cached,
        "not_checked": notes,
    }


# refusals


def _refuse_prompts(found: Prompts, name: str) -> None:
    if len(found.rows) < FEWEST:
        raise UsageError(f"{name}: {len(found.rows)} prompts; fewer than {FEWEST} say nothing. Give more.")
    if found.trained:
        raise UsageError(
            f"{name}: {len(found.trained)} of {len(found.rows)} prompts are from the draft's training set "
            f"({found.trained[0]!r} for one). Give held-out ones: RUN/conversations/conversations.jsonl takes them."
        )


def _check(job: "_Job", served: Served, counts: Counts) -> list[str]:
    """Refuse what would mislead; returns what this engine does not let us check."""
    if any(not job.limits.end_ids.isdisjoint(one.ids[:-1]) for one in served.asked):
        raise UsageError(
            f"{served.url}: answers go on behind an end token: the server ignores it (ignore_eos). What follows is no "
            "text of the target's, and its acceptance is another. Start the server without it."
        )
    prompt_tokens = sum(len(one.prompt) for one in served.asked)
    own = own_reuse([(one.prompt, one.ids) for one in served.asked])
    if counts.cached is not None and counts.cached > own + WARM * prompt_tokens:
        raise UsageError(
            f"{served.url}: {counts.cached / prompt_tokens:.0%} of the prompt tokens came from a warm prefix cache, "
            f"where these prompts share at most {own / prompt_tokens:.0%} among themselves: the server has met them "
            f"before. To clear it, {CLEAR[job.engine]}, and measure again."
        )
    wrote = served.change("vllm:generation_tokens")
    if wrote > 1.05 * served.tokens + 2 * len(served.asked):
        raise UsageError(
            f"{served.url}: wrote {wrote:,.0f} tokens meanwhile, {served.tokens:,} of them for us. Its counters mix us "
            "with other clients; measure while nobody else uses it."
        )
    return ["warm prefix cache"] if counts.cached is None else []


def own_reuse(requests: list[tuple[list[int], list[int]]]) -> int:
    """Prompt tokens that a cold prefix cache could save at most: what each (prompt, answer) shares with another."""
    ordered = sorted((prompt + ids, len(prompt)) for prompt, ids in requests)
    longest = [0] * len(ordered)
    for i in range(1, len(ordered)):  # the longest common prefix with any other is one with a neighbour
        pairs = zip(ordered[i - 1][0], ordered[i][0], strict=False)
        least = min(len(ordered[i - 1][0]), len(ordered[i][0]))
        longest[i] = next((at for at, (a, b) in enumerate(pairs) if a != b), least)
        longest[i - 1] = max(longest[i - 1], longest[i])
    return sum(min(most, size) for most, (_, size) in zip(longest, ordered, strict=True))


# where each engine keeps its counts


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus text as name -> value, summed over labels; a `position` label becomes part of the name: name[2]."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([a-zA-Z_:][\w:]*)(\{.*\})? ([^\s#]+)", text, re.MULTILINE):
        position = re.search(r'position="(\d+)"', labels)
        name = name.removesuffix("_total") + (f"[{position[1]}]" if position else "")
        found[name] = found.get(name, 0.0) + float(value)
    return found


def _vllm_counts(served: Served, _: int | None) -> Counts:
    rounds, at = served.change("vllm:spec_decode_num_drafts"), "vllm:spec_decode_num_accepted_tokens_per_pos"
    depth = sum(name.startswith(f"{at}[") for name in served.after)
    hits = next((n for n in ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits") if n in served.after), None)
    return Counts(
        int(rounds),
        int(served.change("vllm:spec_decode_num_draft_tokens")),
        int(served.change("vllm:spec_decode_num_accepted_tokens")),
        [served.change(f"{at}[{i}]") / max(rounds, 1) for i in range(depth)],
        None if hits is None else int(served.change(hits)),
    )


def _sglang_counts(served: Served, _: int | None) -> Counts:
    metas = [one.value.get("meta_info") or {} for one in served.asked]

    def total(*names: str) -> int:
        return sum(int(next((meta[name] for name in names if meta.get(name) is not None), 0)) for meta in metas)

    rounds = total("spec_verify_ct")
    histograms = [meta.get("spec_correct_drafts_histogram") or [] for meta in metas]  # rounds by tokens kept
    kept = [sum(h[i] for h in histograms if i < len(h)) for i in range(max(map(len, histograms), default=0))]
    return Counts(
        rounds,
        total("spec_num_proposed_drafts", "spec_draft_token_num"),
        total("spec_num_correct_drafts", "spec_accept_token_num"),
        [sum(kept[i:]) / max(rounds, 1) for i in range(1, len(kept))],
        total("cached_tokens") if any("cached_tokens" in meta for meta in metas) else None,
    )


def _llamacpp_counts(served: Served, k: int | None) -> Counts:
    """Rounds from its counters where it has any (--metrics). Else every round but an answer's last drafts K, so that
    an answer's drafted tokens tell its rounds; where confidence cuts drafts short (--spec-draft-p-min) they would be
    too few, and an answer is one token of the prompt's pass and of each round the accepted ones and one more.
    """
    counts, cached = Counts(), [(one.value.get("timings") or {}).get("cache_n") for one in served.asked]
    for one in served.asked:
        timings = one.value.get("timings") or {}
        drafted, accepted = int(timings.get("draft_n") or 0), int(timings.get("draft_n_accepted") or 0)
        by_drafts = -(-drafted // (k or 1))
        by_tokens = int(timings.get("predicted_n") or len(one.ids)) - 1 - accepted
        counts.rounds += by_drafts if by_tokens <= by_drafts + 1 else by_tokens
        counts.drafted += drafted
        counts.accepted += accepted
    if counter := int(served.change("llamacpp:spec_decode_num_drafts")):
        counts.rounds = counter
    elif k is None and counts.drafted:
        raise UsageError(f"{served.url}: {NO_ROUNDS}")
    told = [int(each) for each in cached if each is not None]
    counts.cached = sum(told) if len(told) == len(cached) else None
    return counts


COUNTERS: dict[str, Callable[[Served, int | None], Counts]]
COUNTERS = {"vllm": _vllm_counts, "sglang": _sglang_counts, "llamacpp": _llamacpp_counts}


def _settings(engine: str, info: Json, counts: Counts, k: int | None, url: str) -> Json:
    """Shape and K as the server runs them. Raises UsageError when that is not what the caller said."""
    steps = counts.drafted / counts.rounds
    found: Json = {"shape": "chain", "k": max(round(steps), 1)}
    if engine == "sglang" and info.get("speculative_num_steps"):
        found["k"] = int(info["speculative_num_steps"])
        if int(info.get("speculative_eagle_topk") or 1) > 1:
            total, topk = info.get("speculative_num_draft_tokens"), info["speculative_eagle_topk"]
            found |= {"shape": "tree", "tree": {"total": total, "depth": found["k"], "topk": topk}}
    elif engine == "llamacpp":  # it drafts fewer at an answer's end, and below --spec-draft-p-min
        found |= {"k": max(k or 0, -int(-steps // 1)), "drafted_per_round": round(steps, 2)}
    if k is not None and found["k"] != k:
        raise UsageError(f"{url}: drafts {found['k']} tokens a round, --k says {k}. Start it so, or say what it does.")
    return found


# the requests


@dataclass
class _Job:
    engine: str
    template: ChatTemplate
    limits: Limits
    sampling: Sampling
    concurrency: int
    k: int | None

    async def serve(self, url: str, prompts: Prompts, info: Json) -> Served:
        documents, _ = prepare(prompts.rows, self.template, self.limits, "", "error")
        warm_up, _ = prepare([{"id": "eyas-first", "turns": ["Hello."]}], self.template, self.limits, "", "error")
        asked: list[Asked] = []
        gate, model = asyncio.Semaphore(self.concurrency), str(info.get("model", ""))
        async with _client(600.0) as client:
            first = await self._ask(client, url, model, warm_up[0])  # it also prepares kernels and graphs
            before = await _metrics(client, url)
            silent = self.engine == "llamacpp" and self.k is None and not before
            if silent and (first.value.get("timings") or {}).get("draft_n"):
                raise UsageError(f"{url}: {NO_ROUNDS}")
            begin = time.monotonic()
            with progress(f"measure {url}", len(documents), "conversations") as advance:

                async def converse(document: Document) -> None:
                    async with gate:
                        while not document.done:
                            asked.append(await self._ask(client, url, model, document))
                    advance(1)

                await asyncio.gather(*(converse(document) for document in documents))
            seconds = time.monotonic() - begin
            return Served(url, asked, documents, before, await _metrics(client, url), seconds)

    async def _ask(self, client: "httpx.AsyncClient", url: str, model: str, document: Document) -> Asked:
        protocol, ends = PROTOCOLS[self.engine], self.limits.end_ids
        room = min(self.limits.max_new_tokens, self.limits.length - len(document.tokens))
        body = protocol.body(document, model, room, sorted(ends), self.sampling)
        value = await _json(client, url, protocol.path, body)
        try:
            reply = protocol.reply(value)
        except (KeyError, IndexError, TypeError) as error:
            raise EyasError(f"{url}{protocol.path}: its answer lacks {error}. Is it a {self.engine} server?") from None
        prompt, ids = list(document.tokens), list(reply.ids or [])
        if reply.stopped and len(ids) < room and not (ids and ids[-1] in ends):
            ids.append(self.template.turn_end())  # the engine kept the end token to itself
        document.tokens += ids
        full = len(document.tokens) >= self.limits.length
        end_turn(document, bool(ids) and ids[-1] in ends, full, self.template, self.limits)
        return Asked(prompt, ids, value)


def _client(timeout: float) -> "httpx.AsyncClient":
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=10), limits=httpx.Limits(max_connections=None))


async def _request(client: "httpx.AsyncClient", url: str, path: str, body: Json | None = None) -> "httpx.Response":
    """A server's answer, whatever its status. Raises EyasError when there is none."""
    try:
        return await (client.get(url + path) if body is None else client.post(url + path, json=body))
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise EyasError(f"{url}{path}: no answer ({error or type(error).__name__}). Is the server running?") from None


async def _json(client: "httpx.AsyncClient", url: str, path: str, body: Json | None = None) -> Any:
    """The JSON that a server answers. Raises EyasError when it answers something else."""
    answer = await _request(client, url, path, body)
    said = " ".join(answer.text.split())[:200]
    try:
        if answer.status_code == 200:
            return answer.json()
    except ValueError:
        raise EyasError(f"{url}{path}: answered no JSON ({said}). Check --engine and --url.") from None
    busy = "It is overloaded: lower --concurrency." if answer.status_code in TRANSIENT else "Check --engine and --url."
    raise EyasError(f"{url}{path}: answered {answer.status_code} ({said}). {busy}")


async def _metrics(client: "httpx.AsyncClient", url: str) -> dict[str, float]:
    """Prometheus counters, or nothing where the server has none."""
    answer = await _request(client, url, "/metrics")
    return read_metrics(answer.text) if answer.status_code == 200 else {}


async def _describe(engine: str, url: str) -> Json:
    """What the server says of itself: `model`, `model_path`, and SGLang's settings."""
    async with _client(30.0) as client:
        info = await _json(client, url, PROTOCOLS[engine].sign or "/v1/models")
        if engine == "sglang":
            return info | await _json(client, url, "/server_info")
        if engine == "vllm":
            listed = (await _json(client, url, "/v1/models"))["data"][0]
            return {"model": listed["id"], "model_path": listed.get("root") or listed["id"]}
        return {"model_path": info.get("model_path")}

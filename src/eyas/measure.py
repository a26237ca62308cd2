"""Acceptance and speed of a live server, read from where each engine keeps them, under a set-up that can be trusted.

vLLM: Prometheus counters before and after. SGLang: `meta_info` of each answer, settings from /server_info. llama-server:
`timings` of each answer, which tell drafted and accepted but not per position. Prompts go out as token ids of the
target's own chat template, so the draft meets what it was trained on.
"""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.data.generate import Document, Limits, Sampling, end_turn, prepare
from eyas.data.prompts import Prompts, read_prompts
from eyas.data.servers import PROTOCOLS, TRANSIENT, _turn_end
from eyas.data.template import ChatTemplate
from eyas.errors import EyasError, UsageError
from eyas.progress import progress
from eyas.target import load_tokenizer, read_target

if TYPE_CHECKING:
    import httpx

FEWEST = 8  # prompts below which a figure says nothing
WARM = 0.1  # share of prompt tokens that may come from a cache beyond what these prompts share among themselves
CLEAR = {
    "vllm": "restart the server (or start it with --no-enable-prefix-caching)",
    "sglang": "POST /flush_cache (or start the server with --disable-radix-cache)",
    "llamacpp": "restart the server",
}


@dataclass
class Asked:
    """One request: prompt and answer ids, and the server's JSON."""

    prompt: list[int]
    ids: list[int]
    value: dict[str, Any]


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
    info: dict[str, Any]
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
    timeout: float = 600.0,
) -> dict[str, Any]:
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
    drafted_by = draft or info.get("speculative_draft_model_path")
    found = read_prompts(prompts, limit, drafted_by)
    _refuse_prompts(found, str(prompts))
    limits = Limits(max_new_tokens, known.max_positions, frozenset(template.end_ids))
    job = _Job(engine, template, limits, Sampling(temperature, 0), concurrency, timeout)

    served = job.serve(url, found, info)
    counts = COUNTERS[engine](served, k)
    if not counts.rounds or not counts.drafted:
        raise EyasError(
            f"{url}: {served.tokens:,} tokens were written and none was drafted. Was the server started with "
            "speculation, and with its statistics on?"
        )
    settings = _settings(engine, info, counts, k, url)
    notes = _check(job, served, counts) + (
        [] if found.trained is not None else ["prompts of the training set (--draft)"]
    )
    plain = None
    if plain_url:
        plain = job.serve(plain_url, found, asyncio.run(_describe(engine, plain_url)))
        others = COUNTERS[engine](plain, k)
        if others.drafted:
            raise UsageError(f"{plain_url}: drafts tokens too. --plain-url is a server without speculation.")
        _check(job, plain, others)
    speed = {"speculative": served.tokens / served.seconds} | ({"plain": plain.tokens / plain.seconds} if plain else {})
    same: int | None = None
    if plain and not temperature:
        pairs = zip(served.documents, plain.documents, strict=True)
        same = sum(int(one.tokens == other.tokens) for one, other in pairs)
    return {
        "tau": 1 + counts.accepted / counts.rounds,
        "accept_rate": counts.accepted / counts.drafted,
        "per_position": counts.per_position,
        "protocol": settings
        | {
            "temperature": temperature,
            "loaded_as": engine,
            "prompts": len(found.rows),
            "tokens": served.tokens,
            "data": found.data,
            "concurrency": concurrency,
        },
        "speedup": speed["speculative"] / speed["plain"] if plain else None,
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
        raise UsageError(
            f"{name}: {len(found.rows)} prompts; a figure from fewer than {FEWEST} says nothing. Give more."
        )
    if found.trained:
        raise UsageError(
            f"{name}: {len(found.trained)} of {len(found.rows)} prompts are from the draft's training set "
            f"({found.trained[0]!r} for one). Give held-out ones: RUN/conversations/conversations.jsonl takes them."
        )


def _check(job: "_Job", served: Served, counts: Counts) -> list[str]:
    """Refuse what would mislead; returns what this engine does not let us check."""
    ends, notes = job.limits.end_ids, []
    late = next((one for one in served.asked if not ends.isdisjoint(one.ids[:-1])), None)
    if late is not None:
        raise UsageError(
            f"{served.url}: answers go on behind an end token: the server ignores it (ignore_eos). What follows is no "
            "text of the target's, and its acceptance is another. Start the server without it."
        )
    prompt_tokens = sum(len(one.prompt) for one in served.asked)
    own = own_reuse([(one.prompt, one.ids) for one in served.asked])
    if counts.cached is None:
        notes.append("warm prefix cache")
    elif counts.cached > own + WARM * prompt_tokens:
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
    return notes


def own_reuse(requests: list[tuple[list[int], list[int]]]) -> int:
    """Prompt tokens that a cold prefix cache could save at most: what each (prompt, answer) shares with another."""
    ordered = sorted((prompt + ids, len(prompt)) for prompt, ids in requests)
    longest = [0] * len(ordered)
    for i in range(1, len(ordered)):  # the longest common prefix with any other is one with a neighbour
        shared = 0
        for a, b in zip(ordered[i - 1][0], ordered[i][0], strict=False):
            if a != b:
                break
            shared += 1
        longest[i - 1], longest[i] = max(longest[i - 1], shared), shared
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
    rounds = served.change("vllm:spec_decode_num_drafts")
    positions = [name for name in served.after if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos[")]
    accepted = [served.change(f"vllm:spec_decode_num_accepted_tokens_per_pos[{i}]") for i in range(len(positions))]
    hits = next((n for n in ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits") if n in served.after), None)
    return Counts(
        int(rounds),
        int(served.change("vllm:spec_decode_num_draft_tokens")),
        int(served.change("vllm:spec_decode_num_accepted_tokens")),
        [each / max(rounds, 1) for each in accepted],
        None if hits is None else int(served.change(hits)),
    )


def _sglang_counts(served: Served, _: int | None) -> Counts:
    metas = [one.value.get("meta_info") or {} for one in served.asked]

    def total(*names: str) -> int:
        return sum(int(next((meta[name] for name in names if meta.get(name) is not None), 0)) for meta in metas)

    counts = Counts(
        total("spec_verify_ct"),
        total("spec_num_proposed_drafts", "spec_draft_token_num"),
        total("spec_num_correct_drafts", "spec_accept_token_num"),
        cached=total("cached_tokens") if any("cached_tokens" in meta for meta in metas) else None,
    )
    histograms = [meta.get("spec_correct_drafts_histogram") or [] for meta in metas]  # rounds by tokens kept
    kept = [sum(h[i] for h in histograms if i < len(h)) for i in range(max(map(len, histograms), default=0))]
    counts.per_position = [sum(kept[i:]) / max(counts.rounds, 1) for i in range(1, len(kept))]
    return counts


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
        raise UsageError(
            f"{served.url}: does not tell its rounds. Say how many tokens it drafts (--k, its --spec-draft-n-max), or "
            "start it with --metrics."
        )
    told = [int(each) for each in cached if each is not None]
    counts.cached = sum(told) if len(told) == len(cached) else None
    return counts


COUNTERS: dict[str, Callable[[Served, int | None], Counts]] = {
    "vllm": _vllm_counts,
    "sglang": _sglang_counts,
    "llamacpp": _llamacpp_counts,
}


def _settings(engine: str, info: dict[str, Any], counts: Counts, k: int | None, url: str) -> dict[str, Any]:
    """Shape and K as the server runs them. Raises UsageError when that is not what the caller said."""
    steps = counts.drafted / counts.rounds
    found = {"shape": "chain", "k": max(round(steps), 1)}
    if engine == "sglang" and info.get("speculative_num_steps"):
        found["k"] = int(info["speculative_num_steps"])
        if int(info.get("speculative_eagle_topk") or 1) > 1:
            total, topk = info.get("speculative_num_draft_tokens"), info["speculative_eagle_topk"]
            found |= {"shape": "tree", "tree": {"total": total, "depth": found["k"], "topk": topk}}
    elif engine == "llamacpp":  # it drafts fewer at an answer's end, and below --spec-draft-p-min
        found |= {"k": max(k or 0, -int(-steps // 1)), "drafted_per_round": round(steps, 2)}
    if k is not None and found["k"] != k:
        raise UsageError(
            f"{url}: drafts {found['k']} tokens a round, --k says {k}. Start it with {k}, or say {found['k']}."
        )
    return found


# the requests


@dataclass
class _Job:
    engine: str
    template: ChatTemplate
    limits: Limits
    sampling: Sampling
    concurrency: int
    timeout: float

    def serve(self, url: str, prompts: Prompts, info: dict[str, Any]) -> Served:
        return asyncio.run(self._serve(url, prompts, info))

    async def _serve(self, url: str, prompts: Prompts, info: dict[str, Any]) -> Served:
        documents, _ = prepare(prompts.rows, self.template, self.limits, "", "error")
        first = {"id": "eyas-first", "turns": ["Hello."]}
        warm_up, _ = prepare([first], self.template, self.limits, "", "error")
        asked: list[Asked] = []
        gate, model = asyncio.Semaphore(self.concurrency), str(info.get("model", ""))
        async with _client(self.timeout) as client:
            await self._ask(client, url, model, warm_up[0])  # a server's first answer prepares kernels and graphs
            before = await _metrics(client, url)
            begin = time.monotonic()
            with progress(f"measure {url}", len(documents), "conversations") as advance:

                async def converse(document: Document) -> None:
                    async with gate:
                        while not document.done:
                            asked.append(await self._ask(client, url, model, document))
                    advance(1)

                await asyncio.gather(*(converse(document) for document in documents))
            seconds = time.monotonic() - begin
            return Served(url, asked, documents, before, await _metrics(client, url), info, seconds)

    async def _ask(self, client: "httpx.AsyncClient", url: str, model: str, document: Document) -> Asked:
        protocol = PROTOCOLS[self.engine]
        room = min(self.limits.max_new_tokens, self.limits.length - len(document.tokens))
        body = protocol.body(document, model, room, sorted(self.limits.end_ids), self.sampling)
        value = await _json(client, url, protocol.path, body)
        try:
            reply = protocol.reply(value)
        except (KeyError, IndexError, TypeError) as error:
            raise EyasError(f"{url}{protocol.path}: its answer lacks {error}. Is it a {self.engine} server?") from None
        prompt, ids = list(document.tokens), list(reply.ids or [])
        if reply.stopped and len(ids) < room and not (ids and ids[-1] in self.limits.end_ids):
            ids.append(_turn_end(self.template))  # the engine kept the end token to itself
        document.tokens += ids
        stopped = bool(ids) and ids[-1] in self.limits.end_ids
        end_turn(document, stopped, len(document.tokens) >= self.limits.length, self.template, self.limits)
        return Asked(prompt, ids, value)


def _client(timeout: float) -> "httpx.AsyncClient":
    import httpx

    return httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=10), limits=httpx.Limits(max_connections=None))


async def _json(client: "httpx.AsyncClient", url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that a server answers. Raises EyasError when it does not answer, or not so."""
    import httpx

    try:
        answer = await (client.get(url + path) if body is None else client.post(url + path, json=body))
        said = " ".join(answer.text.split())[:200]
        if answer.status_code == 200:
            return answer.json()
    except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
        raise EyasError(f"{url}{path}: no answer ({error or type(error).__name__}). Is the server running?") from None
    busy = "It is overloaded: lower --concurrency." if answer.status_code in TRANSIENT else "Check --engine and --url."
    raise EyasError(f"{url}{path}: answered {answer.status_code} ({said}). {busy}")


async def _metrics(client: "httpx.AsyncClient", url: str) -> dict[str, float]:
    """Prometheus counters, or nothing where the server has none."""
    answer = await client.get(url + "/metrics")
    return read_metrics(answer.text) if answer.status_code == 200 else {}


async def _describe(engine: str, url: str) -> dict[str, Any]:
    """What the server says of itself: `model`, `model_path`, and SGLang's settings."""
    async with _client(30.0) as client:
        sign = PROTOCOLS[engine].sign
        info = await _json(client, url, sign or "/v1/models")
        if engine == "sglang":
            return info | await _json(client, url, "/server_info")
        if engine == "vllm":
            listed = (await _json(client, url, "/v1/models"))["data"][0]
            return {"model": listed["id"], "model_path": listed.get("root") or listed["id"]}
        return {"model_path": info.get("model_path")}

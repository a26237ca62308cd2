"""Real speculative decoding, one conversation at a time: draft, verify in one target pass, keep, go on.

Between rounds the target's cache holds every token but the last, and the draft's cache a row (x_{t+1}, g_t) for every
token whose successor is known, made from the *target's* states (eagle3.md, "The shift"). Rows that the draft adds
while it guesses are made from its own states, and are dropped when the target has spoken.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from eyas.data.slots import _cache_name
from eyas.decode.verify import choose, distribution, on_target_vocabulary, verify_drawn_chain, verify_walk
from eyas.draft.model import Attend, Draft
from eyas.errors import UsageError
from eyas.target import LoadedTarget


class Drafter:
    """A draft with a cache of its own: keys and values [T, kv, d] a layer, and the position of each of the T rows."""

    def __init__(self, draft: Draft, device: torch.device, dtype: torch.dtype) -> None:
        self.draft, self.dtype = draft, dtype
        for linear in draft.linears():
            linear.stale()  # a cast may be older than its weights
        c = draft.config
        empty = torch.empty(0, c.num_key_value_heads, c.head_dim, dtype=dtype, device=device)
        self.cache = [(empty, empty) for _ in draft.stack]
        self.at = torch.empty(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.at)

    def crop(self, rows: int) -> None:
        self.cache = [(k[:rows], v[:rows]) for k, v in self.cache]
        self.at = self.at[:rows]

    def run(self, tokens: torch.Tensor, hidden: torch.Tensor, at: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Append rows of tokens [n] and hidden [n, D] at positions `at` [n]; the layers' output [n, D].

        A row sees all of the cache but its last columns, where `own` bool [n, s] says what it sees (s >= n: the new
        rows are the last of them).
        """
        self.at = torch.cat([self.at, at])
        seen = F.pad(own, (len(self.at) - own.shape[1], 0), value=True)  # [n, T]
        if self.draft.config.sliding_window is not None:
            seen &= self.at > at[:, None] - self.draft.config.sliding_window
        e = self.draft.embed(tokens, self.dtype)
        return self.draft.step(e, hidden, at, [self._attend(index, seen) for index in range(len(self.cache))])

    def _attend(self, index: int, seen: torch.Tensor) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = (torch.cat(pair) for pair in zip(self.cache[index], (k, v), strict=True))
            self.cache[index] = keys, values
            keys, values = (x.transpose(0, 1)[None] for x in (keys, values))  # [1, kv, T, d]
            rows, heads, d = q.shape
            q = q.view(rows, keys.shape[1], -1, d).permute(1, 2, 0, 3).flatten(1, 2)[None]  # [1, kv, group * rows, d]
            mask = seen.repeat(heads // keys.shape[1], 1)  # a group's heads as rows: far faster than repeated keys
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, scale=self.draft.config.softmax_scale
            )[0]
            return out.view(keys.shape[1], -1, rows, values.shape[-1]).permute(2, 0, 1, 3).reshape(rows, heads, -1)

        return attend

    def extend(self, tokens: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        """Rows of the target's states aux [n, A*H] and the token after each, [n]; the last row's output [1, D]."""
        n, device = len(tokens), aux.device
        at = torch.arange(len(self), len(self) + n, device=device)
        own = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        return self.run(tokens, self.draft.fuse(aux), at, own)[-1:]

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """[n, Vd] from the layers' output [n, D]."""
        return self.draft.lm_head(self.draft.norm(output))


@dataclass
class Guess:
    """Drafted tokens as a tree: node 0 is the last known token, parents come before their children.

    q float32 [K, Vd]: what a chain was drawn from, when sampling.
    """

    tokens: list[int]
    parents: list[int]
    q: torch.Tensor | None = None

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.tokens) - 1))


Propose = Callable[[Drafter, torch.Tensor, int, float, torch.Generator], Guess]


@dataclass(frozen=True)
class Chain:
    """K tokens one after the other, each from the one before."""

    k: int

    def __call__(
        self, drafter: Drafter, output: torch.Tensor, last: int, temperature: float, generator: torch.Generator
    ) -> Guess:
        """output [1, D]: of the drafter's newest row, which read the last known token."""
        draft, rows = drafter.draft, len(drafter)
        tokens: list[torch.Tensor] = []
        shares: list[torch.Tensor] = []
        one = torch.ones(1, 1, dtype=torch.bool, device=output.device)
        for step in range(self.k):
            if step:
                output = drafter.run(tokens[-1], draft.next_hidden(output), drafter.at[-1:] + 1, one)
            logits = drafter.logits(output)  # [1, Vd]
            if temperature:
                shares.append(distribution(logits, temperature))
            tokens.append(draft.target_ids(choose(logits, temperature, generator)))
        drafter.crop(rows)
        q = torch.cat(shares) if shares else None
        return Guess([last, *torch.cat(tokens).tolist()], list(range(-1, self.k)), q)


@dataclass
class Answer:
    """What one turn got. starts [rounds]: the draft's row a round began at; accepted [rounds]: drafted tokens kept.

    Seconds: reading the prompt, drafting, verifying, and all (the rest is bookkeeping).
    """

    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    seconds: float = 0.0


class Decoder:
    """One conversation. Without a draft it decodes plainly: a round then verifies nothing and adds one token."""

    def __init__(
        self,
        target: LoadedTarget,
        draft: Draft | None = None,
        propose: Propose | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.target, self.temperature, self.propose = target, temperature, propose
        self.layers = list(draft.config.aux_layers) if draft is not None else []
        self.drafter = Drafter(draft, target.device, target.dtype) if draft is not None else None
        self.cache = DynamicCache()  # whole keys for every layer: a sliding window is a matter of the mask
        self.cache_name = _cache_name(target)
        self.generator = torch.Generator(target.device).manual_seed(seed)
        self.tokens: list[int] = []
        self.unread: list[torch.Tensor] = []  # the target's states [n, A*H] that the draft has not read yet

    @torch.inference_mode()
    def answer(self, prompt: list[int], room: int, ends: frozenset[int]) -> Answer:
        """Read `prompt` (the first turn, or what leads to the next) and write up to `room` tokens or an end token."""
        answer, begin = Answer(), time.perf_counter()
        self.tokens += prompt
        cached = self.cache.get_seq_length()
        logits, aux = self._read(self.tokens[cached:], None, 1)
        self._keep(choose(logits, self.temperature, self.generator).tolist(), aux, answer)
        answer.prefill = time.perf_counter() - begin
        while answer.tokens[-1] not in ends and len(answer.tokens) < room:
            start = time.perf_counter()
            guess = self._guess()
            drafted = time.perf_counter()
            logits, aux = self._read(guess.tokens, guess, len(guess.tokens))
            path, added = self._verify(guess, logits)
            verified = time.perf_counter()
            new = [guess.tokens[node] for node in path[1:]] + [added]
            new = new[: room - len(answer.tokens)]
            new = new[: next((i for i, token in enumerate(new) if token in ends), len(new)) + 1]
            if self.drafter is not None:
                answer.starts.append(len(self.tokens) - 2)
                answer.accepted.append(min(len(path) - 1, len(new)))
                answer.drafted += len(guess.tokens) - 1
            path = path[: len(new)]
            self._keep_rows(len(self.tokens) - 1, path, len(guess.tokens))
            self._keep(new, aux[path] if self.drafter is not None else aux, answer)
            answer.draft += drafted - start
            answer.verify += verified - drafted
        answer.seconds = time.perf_counter() - begin
        return answer

    def _read(self, tokens: list[int], guess: Guess | None, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over tokens behind the cache: logits [wanted, V] of the last ones, auxiliary states [n, A*H]."""
        device, past = self.target.device, self.cache.get_seq_length()
        at, mask = torch.arange(past, past + len(tokens), device=device), None
        if guess and not guess.is_chain:
            from eyas.decode.tree import depths, tree_mask

            at = past + torch.tensor(depths(guess.parents), device=device)
            mask = tree_mask(guess.parents, past, self.target)
        with self.target.capturing(self.layers) as caught:
            self.target.body(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=at[None],
                attention_mask=mask,
                use_cache=True,
                **{self.cache_name: self.cache},
            )
        aux = torch.cat([caught[v][0] for v in self.layers], -1) if self.layers else caught["final"][0]
        return self.target.logits(caught["final"][0, -wanted:]), aux

    def _guess(self) -> Guess:
        if self.drafter is None or self.propose is None:
            return Guess(self.tokens[-1:], [-1])
        aux = torch.cat(self.unread)
        self.unread.clear()
        following = self.tokens[len(self.drafter) + 1 :]
        output = self.drafter.extend(torch.tensor(following, device=aux.device), aux)
        return self.propose(self.drafter, output, self.tokens[-1], self.temperature, self.generator)

    def _verify(self, guess: Guess, logits: torch.Tensor) -> tuple[list[int], int]:
        if guess.q is None or self.drafter is None:
            chosen = choose(logits, self.temperature, self.generator).tolist()
            return verify_walk(guess.tokens, guess.parents, chosen)
        draft = self.drafter.draft
        ids = draft.target_ids(torch.arange(draft.config.draft_vocab_size, device=logits.device))
        q = on_target_vocabulary(guess.q, ids, logits.shape[1])
        return verify_drawn_chain(guess.tokens[1:], q, distribution(logits, self.temperature), self.generator)

    def _keep(self, new: list[int], aux: torch.Tensor, answer: Answer) -> None:
        """Tokens that are now known, and the states of those before them."""
        self.tokens += new
        answer.tokens += new
        if self.drafter is not None:
            self.unread.append(aux)

    def _keep_rows(self, past: int, path: list[int], count: int) -> None:
        """Of the `count` newest rows of the target's cache, keep those of the nodes on the path."""
        if path != list(range(len(path))):
            rows = torch.tensor([past + node for node in path], device=self.target.device)
            layers: list[Any] = self.cache.layers
            for layer in layers:
                for kept in (layer.keys, layer.values):  # the path's rows move to the front of the new ones
                    kept[:, :, past : past + len(path)] = kept[:, :, rows]
        if len(path) < count:
            self.cache.crop(len(path) - count)


def check_target(target: LoadedTarget) -> None:
    """Raises UsageError for a target whose state cannot be taken back by some tokens."""
    kinds = set(getattr(target.body.config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention", "chunked_attention"}:
        raise UsageError(
            f"{target.target.path}: has layers of kind {', '.join(sorted(kinds))}; rejected tokens cannot be taken back "
            "from their state here. Use `eyas replay`, which needs no target."
        )

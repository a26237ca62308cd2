"""Prompts decoded plainly and speculatively in one process, turn by turn, and compared token for token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eyas.data.generate import Document, Limits, end_turn, prepare
from eyas.data.prompts import Prompts
from eyas.data.slots import _packed_linears
from eyas.data.template import ChatTemplate
from eyas.decode.chain import Answer, Chain, Decoder, check_target
from eyas.decode.replay import Acceptance, Conversation, figures, loaded_as, protocol
from eyas.decode.tree import Tree
from eyas.draft.model import Draft
from eyas.progress import progress
from eyas.target import LoadedTarget


@dataclass
class Pair:
    """One conversation both ways: documents as `eyas generate` would write them, and the answers' figures."""

    plain: Document
    fast: Document
    plain_answers: list[Answer]
    fast_answers: list[Answer]


def converse(decoder: Decoder, document: Document, template: ChatTemplate, limits: Limits) -> list[Answer]:
    """Take a document through all its turns."""
    answers = []
    while not document.done:
        room = min(limits.max_new_tokens, limits.length - len(document.tokens))
        answers.append(decoder.answer(document.tokens[len(decoder.tokens) :], room, limits.end_ids))
        document.tokens += answers[-1].tokens
        stopped = document.tokens[-1] in limits.end_ids
        end_turn(document, stopped, len(document.tokens) >= limits.length, template, limits)
    return answers


def both_ways(
    rows: list[dict[str, Any]],
    target: LoadedTarget,
    draft: Draft,
    propose: Chain | Tree,
    template: ChatTemplate,
    limits: Limits,
    temperature: float = 0.0,
    seed: int = 0,
    advance: Callable[..., None] = lambda *_: None,
) -> list[Pair]:
    """Each conversation plainly and then speculatively, one after the other, so that both meet the same machine.

    Draws depend on the seed and a conversation's place. The draft is moved to the target's device and dtype.
    """
    check_target(target)
    draft = draft.to(target.device, target.dtype)
    plain, fast = (prepare(rows, template, limits, "", "error")[0] for _ in range(2))
    pairs = []
    for number, (one, other) in enumerate(zip(plain, fast, strict=True)):
        if not number:  # the first pass of a process also prepares kernels
            Decoder(target, draft, propose).answer(one.tokens, 8, frozenset())
            Decoder(target).answer(one.tokens, 8, frozenset())
        slow = converse(Decoder(target, None, None, temperature, seed + number), one, template, limits)
        quick = converse(Decoder(target, draft, propose, temperature, seed + number), other, template, limits)
        pairs.append(Pair(one, other, slow, quick))
        advance(1)
    return pairs


def acceptance(pairs: list[Pair], k: int) -> Acceptance:
    """The rounds of all conversations, in the form that replay gives them."""
    conversations = []
    for pair in pairs:
        asked, answers = pair.fast.conversation, pair.fast_answers
        starts = [start for answer in answers for start in answer.starts]
        kept = [accepted for answer in answers for accepted in answer.accepted]
        written = sum(len(answer.tokens) for answer in answers)
        conversations.append(Conversation(asked["id"], asked.get("category") or "", written, starts, kept))
    return Acceptance(k, conversations)


@torch.inference_mode()
def difference(pair: Pair, target: LoadedTarget) -> dict[str, Any] | None:
    """Where two greedy texts part, and by how much the target preferred the one token to the other, or None.

    margin: difference of the target's two logits in one pass over what comes before. A margin of about the dtype's
    rounding means a tie that another order of sums decides otherwise; a larger one means a fault.
    """
    one, other = pair.plain.tokens, pair.fast.tokens
    if one == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    found: dict[str, Any] = {"id": pair.plain.conversation["id"], "position": at, "margin": None}
    if at < min(len(one), len(other)):
        with target.capturing([]) as caught:
            target.body(input_ids=torch.tensor([one[:at]], device=target.device), use_cache=False)
        logits = target.logits(caught["final"][0, -1:])[0].float()
        found["margin"] = abs(float(logits[one[at]] - logits[other[at]]))
    return found


def decode(
    draft: Draft,
    target: LoadedTarget,
    prompts: Prompts,
    propose: Chain | Tree,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    engine: str | None = None,
) -> dict[str, Any]:
    """`eyas decode`: the figures of its JSON contract, with the cost of a round and where its time goes."""
    template = ChatTemplate(target.tokenizer)  # type: ignore[arg-type]
    limits = Limits(max_new_tokens, target.target.max_positions, frozenset(template.end_ids))
    depth = propose.k if isinstance(propose, Chain) else propose.depth
    with progress("decode", len(prompts.rows), "conversations") as advance, _packed_linears(target, depth + 1):
        pairs = both_ways(prompts.rows, target, draft, propose, template, limits, temperature, seed, advance)
    found = acceptance(pairs, depth)
    slow = [answer for pair in pairs for answer in pair.plain_answers]
    quick = [answer for pair in pairs for answer in pair.fast_answers]
    ways = {"plain": slow, "speculative": quick}
    speed = {name: sum(len(a.tokens) for a in way) / sum(a.seconds for a in way) for name, way in ways.items()}
    drafted, rounds = sum(a.drafted for a in quick), max(found.rounds, 1)
    spent = {name: sum(getattr(a, name) for a in quick) for name in ("draft", "verify")}
    loop = max(sum(a.seconds - a.prefill for a in quick), 1e-9)
    differences = [] if temperature else [d for pair in pairs if (d := difference(pair, target))]
    data = prompts.data if not prompts.trained else f"{prompts.data}, {len(prompts.trained)} of them trained on"
    steps = max(sum(len(a.tokens) - 1 for a in slow), 1)
    shape = propose.k if isinstance(propose, Chain) else propose
    dtype = str(target.dtype).removeprefix("torch.")
    return figures(found) | {
        "accept_rate": found.accepted / max(drafted, 1),
        "protocol": protocol(found, shape, loaded_as(engine), data) | {"temperature": temperature, "dtype": dtype},
        "speedup": speed["speculative"] / speed["plain"],
        "lossless": None if temperature else not differences,
        "drafted": drafted,
        "tokens_per_s": speed,
        "share": {name: value / loop for name, value in spent.items()}
        | {"bookkeeping": 1 - sum(spent.values()) / loop},
        "round_ms": {name: 1e3 * value / rounds for name, value in spent.items()}
        | {"plain_token": 1e3 * sum(a.seconds - a.prefill for a in slow) / steps},
        "differences": differences,
    }

"""The same prompts in every real engine and in our own chain decoder, in float32: the integers side by side.

`python tests/engines/side_by_side.py [RUN] [--target T]` serves the run's draft (runs/smollm2 by default) on held-out
prompts and writes the table into docs/engines.md (make engine-integers). Our decoder runs what `load_as` says that the
engine loads, under the engine's rule for the last round; greedy tokens, drafted and accepted must be the engine's own.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")] if str(ROOT / "tests") not in sys.path else []

from engines import llamacpp  # noqa: E402
from engines.faults import LAST_ROUND, WORKERS, available, count, write_docs  # noqa: E402
from eyas.decode.chain import Answer, Chain, Decoder, Guess  # noqa: E402
from eyas.draft.model import Draft  # noqa: E402
from eyas.serving.contract import ENGINES  # noqa: E402
from eyas.serving.load import load_as  # noqa: E402
from eyas.target import LoadedTarget, load_target  # noqa: E402


def held_out(run: Path, count: int, longest: int, new: int) -> list[list[int]]:
    """Token ids of prompts that training never saw, whose answers are long enough not to end meanwhile."""
    kept = set(json.loads((run / "conversations" / "split.json").read_text())["heldout"])
    found = []
    for line in (run / "answers" / "answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        start, end = row["spans"][0]
        if row["id"] in kept and start <= longest and end - start > 2 * new:
            found.append(row["tokens"][:start])
    return found[:: max(len(found) // count, 1)][:count]


@dataclass
class Ours:
    """Our chain decoder on a target and the draft as an engine loads it."""

    target: LoadedTarget
    draft: Draft
    new: int
    k: int
    kept: dict[tuple[int, ...], tuple[Answer, list[list[int]]]] = field(default_factory=dict)

    def answer(self, prompt: list[int]) -> tuple[Answer, list[list[int]]]:
        """The answer, and what was drafted in each round. It goes on past the end, so that the last round is whole: what
        an engine drafts of it less is its beginning."""
        if tuple(prompt) not in self.kept:
            guesses: list[list[int]] = []

            def propose(*given: Any) -> Guess:
                guess = Chain(self.k)(*given)
                guesses.append(guess.tokens[1:])
                return guess

            decoder = Decoder(self.target, self.draft, propose)
            self.kept[tuple(prompt)] = decoder.answer(prompt, self.new + 2 * self.k + 2, frozenset()), guesses
        return self.kept[tuple(prompt)]

    def ends(self, prompt: list[int]) -> bool:
        """llama-server never writes an end token that it was told to ignore, so there the texts would part."""
        return not set(self.target.target.eos_ids).isdisjoint(self.answer(prompt)[0].tokens)

    def counts(self, prompt: list[int], rule: str) -> dict:
        """{"tokens", "drafted", "accepted", "per_position"} under an engine's rule for the last round."""
        answer, guesses = self.answer(prompt)
        rounds = zip(answer.accepted, guesses, strict=True)
        if rule == "left out":  # OpenVINO, where a draft that guesses an end token guesses no further
            ends = set(self.target.target.eos_ids)
            rounds = ((kept, g[: next((i + 1 for i, t in enumerate(g) if t in ends), self.k)]) for kept, g in rounds)
        return {"tokens": answer.tokens[: self.new]} | count(rounds, self.new, self.k, rule)


def serve(engine: str, target: Path, draft: Path, prompts: list[list[int]], new: int, k: int, folder: Path) -> list:
    """The answers of a real engine. Raises RuntimeError with its own words when it fails."""
    if engine == "llamacpp":
        with llamacpp.Converter() as convert:
            said = convert(target, folder / "t.gguf") or convert(draft, folder / "d.gguf", target)
        if said:
            raise RuntimeError(said)
        with llamacpp.serving(folder / "t.gguf", folder / "d.gguf", k) as url:
            return [llamacpp.complete(url, prompt, new, k) for prompt in prompts]
    with WORKERS[engine]() as run:
        found = run(target, draft, prompts, new, k, folder / engine)
    if "error" in found:
        raise RuntimeError(found["error"])
    return found["answers"]


def compare(engine: str, ours: Ours, draft: Path, prompts: list[list[int]]) -> list[str]:
    """One line of the table, and a line on stderr for every prompt that differs."""
    new, k, target = ours.new, ours.k, ours.target
    mine = [ours.counts(prompt, LAST_ROUND[engine]) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        theirs = serve(engine, target.target.path, draft, prompts, new, k, Path(folder))
    total = {who: {"drafted": 0, "accepted": 0, "per_position": [0] * k} for who in ("eyas", engine)}
    same = 0
    for index, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        for who, counts in (("eyas", left), (engine, right)):
            for key in ("drafted", "accepted"):
                total[who][key] += counts[key]
            pairs = zip(total[who]["per_position"], counts.get("per_position", []), strict=False)
            total[who]["per_position"] = [a + b for a, b in pairs]
        same += left["tokens"] == right["tokens"]
        if wrong := [key for key in right if left[key] != right[key]]:
            first = next((i for i, pair in enumerate(zip(left["tokens"], right["tokens"], strict=False)) if len(set(pair)) > 1), None)  # fmt: skip
            told = "; ".join(f"{key} {left[key]}, {engine} {right[key]}" for key in wrong if key != "tokens")
            print(f"{engine}: prompt {index}: {told}; first other token {first}", file=sys.stderr)
    cells = [
        ENGINES[engine].title,
        f"out{ours.draft.config.aux_layers}, last round {LAST_ROUND[engine]}",
        f"{same} of {len(prompts)}",
    ]
    for key in ("drafted", "accepted"):
        cells.append(f"{total['eyas'][key]} / {total[engine][key]}")
    told = [" ".join(map(str, total[who]["per_position"])) for who in ("eyas", engine)]
    return [*cells, f"{told[0]} / {told[1] or 'not told'}"]


def equal(one: Draft, other: Draft) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, default=ROOT / "runs" / "smollm2")
    parser.add_argument("--target", default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--engines", nargs="*", default=list(LAST_ROUND), choices=LAST_ROUND)
    for name, value in (("prompts", 12), ("new", 64), ("k", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    target, draft = load_target(given.target, "float32"), given.run / "draft"
    decoders: dict[str, Ours] = {}
    for engine in LAST_ROUND:  # those that load the same draft share a decoder, and what it has answered
        config, state, _ = load_as(draft, target.target, engine)
        network = Draft(config).requires_grad_(False)
        network.load_state_dict(state)
        same = (d for d in decoders.values() if d.draft.config == config and equal(d.draft, network))
        decoders[engine] = next(same, Ours(target, network, given.new, given.k))
    candidates = held_out(given.run, 2 * given.prompts, 250, given.new)
    prompts = list(islice((prompt for prompt in candidates if not decoders["vllm"].ends(prompt)), given.prompts))
    kept = ROOT / "build" / "integers.json"  # what each engine said last: one can be tried without the others
    kept.parent.mkdir(exist_ok=True)
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for engine in given.engines:
        if engine not in available():
            print(f"{engine}: not installed, left out (make engines)", file=sys.stderr)
            continue
        start = time.monotonic()
        rows[engine] = compare(engine, decoders[engine], draft, prompts)
        print(f"{engine}: {' | '.join(rows[engine])} ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
        kept.write_text(json.dumps(rows))
    lines = ["| engine | our decoder's rules | same text | drafted: eyas / engine | accepted | accepted by position |"]
    lines += [
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(rows[engine])} |" for engine in LAST_ROUND if engine in rows),
    ]
    lines.append(f"\n{len(prompts)} held-out prompts, {given.new} greedy tokens each, chains of {given.k}, float32.")
    print("\n".join(lines))
    write_docs({"integers": "\n".join(lines)})


if __name__ == "__main__":
    main()

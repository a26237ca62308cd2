"""Tokens per second of generation in slots against Transformers' own `generate` in static batches, in one process.

    python benchmarks/generate.py models/smollm2-135m [--prompts 128] [--max-new-tokens 128] [--batch 48]

Both write greedy answers to the first user turns of the same prompts. The static batches are sorted by length and
padded on the left, as one would do by hand. Prints one JSON object.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from eyas.data.generate import generate
from eyas.data.template import ChatTemplate
from eyas.target import LoadedTarget, load_target

PROMPTS = Path(__file__).parents[1] / "examples" / "prompts.jsonl"


def static_batches(target: LoadedTarget, talks: list[dict], batch: int, max_new_tokens: int) -> dict[str, list[int]]:
    """id -> answer ids, end token included."""
    template = ChatTemplate(target.tokenizer)
    prompts = {talk["id"]: template.prompt_ids([{"role": "user", "content": talk["turns"][0]}]) for talk in talks}
    order = sorted(prompts, key=lambda name: len(prompts[name]))
    answers: dict[str, list[int]] = {}
    for first in range(0, len(order), batch):
        names = order[first : first + batch]
        width = max(len(prompts[name]) for name in names)
        ids = torch.tensor([[0] * (width - len(prompts[name])) + prompts[name] for name in names])
        mask = torch.tensor([[0] * (width - len(prompts[name])) + [1] * len(prompts[name]) for name in names])
        written = target.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(template.end_ids),
            pad_token_id=0,
        )
        for name, row in zip(names, written[:, width:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in template.end_ids), len(row))
            answers[name] = row[:end]
    return answers


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    target = load_target(arguments.target, dtype=arguments.dtype)
    talks = [json.loads(line) for line in arguments.file.read_text("utf-8").splitlines()]
    random.Random(0).shuffle(talks)
    talks = [talk | {"turns": talk["turns"][:1], "system": None} for talk in talks[: arguments.prompts]]
    with tempfile.TemporaryDirectory() as folder:
        generate(talks[:2], target, Path(folder) / "warm", max_new_tokens=4, slots=arguments.slots)
        static_batches(target, talks[:2], 2, 4)
        figures = generate(
            talks, target, Path(folder) / "answers", max_new_tokens=arguments.max_new_tokens, slots=arguments.slots
        )
        documents = [json.loads(line) for line in (Path(folder) / "answers").read_text("utf-8").splitlines()]
    begin = time.monotonic()
    static = static_batches(target, talks, arguments.batch, arguments.max_new_tokens)
    seconds = time.monotonic() - begin
    ours = {d["id"]: d["tokens"][d["spans"][0][0] : d["spans"][0][1]] for d in documents}
    static_rate = sum(map(len, static.values())) / seconds
    return {
        "prompts": len(talks),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "eyas": {"tokens": figures["generated_tokens"], "seconds": figures["seconds"], "engine": figures["engine"]},
        "eyas_tokens_per_second": figures["tokens_per_second"],
        "static": {"tokens": sum(map(len, static.values())), "seconds": round(seconds, 3), "batch": arguments.batch},
        "static_tokens_per_second": round(static_rate, 1),
        "ratio": round(figures["tokens_per_second"] / static_rate, 2),
        "same_answers": sum(ours[name] == static[name] for name in ours),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--file", type=Path, default=PROMPTS)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=48, help="rows of a static batch")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    print(json.dumps(compare(parser.parse_args())))

"""Extraction against the bare target: tokens/s of both, over the same batches, in turns, from one run.

    python benchmarks/extract.py models/smollm2-135m RUN/answers/answers.jsonl [--documents 24] [--codec bf16z]

"bare" is the target's own forward (body and head) over the same right-padded batches, with nothing kept.
"body" leaves the head out: the least that any extraction must compute.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from eyas.features.extract import batches, extract
from eyas.target import load_target


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("target")
    options.add_argument("answers", type=Path)
    options.add_argument("--documents", type=int, default=24)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--token-budget", type=int, default=4096)
    options.add_argument("--codec", default="bf16z")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    target = load_target(given.target)
    documents = [json.loads(line) for line in given.answers.read_text("utf-8").splitlines()][: given.documents]
    tokens = sum(len(document["tokens"]) for document in documents)
    padded = []
    for batch in batches([len(document["tokens"]) for document in documents], given.token_budget):
        ids = torch.zeros(len(batch), max(len(documents[i]["tokens"]) for i in batch), dtype=torch.long)
        for row, i in enumerate(batch):
            ids[row, : len(documents[i]["tokens"])] = torch.tensor(documents[i]["tokens"])
        padded.append(ids)

    def bare() -> None:
        with torch.inference_mode():
            for ids in padded:
                target.model(input_ids=ids, use_cache=False)

    def body() -> None:
        with torch.inference_mode():
            for ids in padded:
                target.body(input_ids=ids, use_cache=False)

    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            extract(documents, target, folder, codec=given.codec, token_budget=given.token_budget, threshold=0)

    best = {work.__name__: float("inf") for work in (bare, body, whole)}
    bare()  # the first pass pays for packing the weights
    for _ in range(given.rounds):
        for work in (bare, body, whole):
            start = time.perf_counter()
            work()
            best[work.__name__] = min(best[work.__name__], time.perf_counter() - start)
    rate = {name: tokens / seconds for name, seconds in best.items()}
    result = {
        "documents": len(documents),
        "tokens": tokens,
        "codec": given.codec,
        "bare_tokens_per_s": round(rate["bare"], 1),
        "body_tokens_per_s": round(rate["body"], 1),
        "extract_tokens_per_s": round(rate["whole"], 1),
        "extract_over_bare": round(rate["whole"] / rate["bare"], 3),
        "extract_over_body": round(rate["whole"] / rate["body"], 3),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

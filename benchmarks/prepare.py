"""Rows per second of preparing conversations: reading, template, tokens, mask.

    python benchmarks/prepare.py TARGET [--rows 20000] [--words 90]

Prints one JSON object: prompts (read, render, tokenise, length filter) and imported conversations (read, render each
turn's prompt, tokenise, prove the mask), for one-turn and three-turn conversations. Rows per second depend on what else
the machine does, CPU time per row (of all processes together) hardly.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from eyas.data.conversations import prepare_conversations
from eyas.data.documents import import_documents, read_lines
from eyas.data.template import ChatTemplate

WORDS = """time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name the of and to in that it was for on are with as his they
at be this have from or one had by but not what all were when we there can an your which their said if do will each
about how up out them then she many some so these would other into has more her two like him see could no make than
first been its who now my made over did down only way find use may long little very after called just where most
know get through back much before go good new write our used me same any come our show every small large 12 7 3.5
""".split()  # noqa: SIM905


def conversations(rows: int, turns: int, words: int, seed: int = 0):
    """Made-up conversations: a question of a quarter of `words`, an answer of the rest, `turns` times."""
    draw = random.Random(seed)

    def text(n: int) -> str:
        return " ".join(draw.choices(WORDS, k=max(3, round(draw.gauss(n, n / 4))))).capitalize() + "."

    for i in range(rows):
        talk = []
        for _ in range(turns):
            talk += [
                {"role": "user", "content": text(words // 4)},
                {"role": "assistant", "content": text(words * 3 // 4)},
            ]
        yield {"id": f"c{i}", "messages": talk}


def cpu() -> float:
    """Seconds of CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=90)
    arguments = parser.parse_args()
    template = ChatTemplate(AutoTokenizer.from_pretrained(arguments.target))
    result: dict = {"rows": arguments.rows, "words": arguments.words}
    with tempfile.TemporaryDirectory() as folder:
        for turns in (1, 3):
            made, kept, out = (Path(folder) / f"{name}{turns}.jsonl" for name in ("made", "kept", "answers"))
            with open(made, "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in conversations(arguments.rows, turns, arguments.words))
            start = time.perf_counter()
            prepare_conversations([made], kept)
            read = time.perf_counter()
            prepare_conversations([made], kept, template=template)
            prompts = time.perf_counter()
            spent = cpu()
            prepare_conversations([made], kept, answers=True)
            report = import_documents(read_lines(kept), template, out)
            masked, spent = time.perf_counter(), cpu() - spent
            tokens = sum(len(document["tokens"]) for document in read_lines(out))
            result[f"{turns}_turns"] = {
                "tokens_per_row": round(tokens / report.kept),
                "read_rows_per_s": round(arguments.rows / (read - start)),
                "prompt_rows_per_s": round(arguments.rows / (prompts - read)),
                "mask_rows_per_s": round(arguments.rows / (masked - prompts)),
                "mask_tokens_per_s": round(tokens / (masked - prompts)),
                "mask_cpu_us_per_row": round(1e6 * spent / arguments.rows),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

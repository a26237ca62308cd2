"""The real vLLM on the CPU, from .venv-vllm: one process imports it once and forks for every case."""

from engines.worker import Worker, python

PYTHON = python("vllm")
_WORKER = """
import json, os, sys
reply = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints on stdout
import torch
torch.set_num_threads(1)  # a fork after threads have started would hang
import vllm
from vllm import LLM, SamplingParams

def say(case, result):
    with open(case["out"] + ".json", "w") as file:
        json.dump(result, file)

def run(case):
    say(case, {"error": "the engine's process died", "stage": "load"})
    speculative = {"method": "eagle3", "model": case["draft"], "num_speculative_tokens": case["k"]}
    llm = LLM(model=case["target"], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
              disable_log_stats=False, seed=0, speculative_config=speculative)
    case["stage"] = "late"
    say(case, {"error": "the engine's process died", "stage": "late"})
    answers, names = [], ("drafts", "draft_tokens", "accepted_tokens")
    before, positions = [0, 0, 0], [0] * case["k"]
    for prompt in case["prompts"]:
        sampling = SamplingParams(temperature=0, max_tokens=case["new"], ignore_eos=True, detokenize=False)
        out = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        found = {m.name: m for m in llm.get_metrics()}
        now = [int(found["vllm:spec_decode_num_" + n].value) for n in names]
        there = list(found["vllm:spec_decode_num_accepted_tokens_per_pos"].values)
        answers.append({
            "tokens": list(out[0].outputs[0].token_ids), "drafted": now[1] - before[1], "accepted": now[2] - before[2],
            "per_position": [int(b - a) for a, b in zip(positions, there)],
        })
        before, positions = now, there
    return {"answers": answers}

for line in sys.stdin:
    case = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(case["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            result = run(case)
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "stage": case.get("stage", "load")}
        say(case, result)
        os._exit(0)
    os.waitpid(child, 0)
    print(open(case["out"] + ".json").read(), file=reply, flush=True)
"""


class Vllm(Worker):
    def __init__(self) -> None:
        super().__init__(PYTHON, _WORKER, {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        })  # fmt: skip

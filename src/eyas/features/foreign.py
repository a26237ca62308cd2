"""States that other programs extracted: one file a conversation. Verified as they lie, or imported into a store.

    speculators, vLLM   *.safetensors   hidden_states [T, n, H], token_ids [T]; the last of the n is taken before the final norm
    SpecForge           *.ckpt[.gz]     input_ids, loss_mask, aux_hidden_state [T, A*H], hidden_state [T, H] after the final norm
    EAGLE               *.pt, *.ckpt    input_ids, loss_mask, hidden_state(s) [T, A*H], target [T, H]

Pickles are opened with weights_only, so no code of theirs runs. Safetensors are read without torch.
"""

import gzip
import io
import pickle
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.errors import EyasError, UsageError
from eyas.features.codec import to_bits
from eyas.features.health import THRESHOLD, implausible
from eyas.features.index import summary
from eyas.features.record import Damaged, Sample, mask_of, teacher_positions
from eyas.progress import progress
from eyas.target import read_header

if TYPE_CHECKING:
    from eyas.target import LoadedTarget

SUFFIXES = (".safetensors", ".pt", ".ckpt", ".pt.gz", ".ckpt.gz")
TOKENS = ("token_ids", "input_ids")
AUX = ("hidden_states", "aux_hidden_state", "aux_hidden_states", "hidden_state")
FINAL = ("hidden_state", "target", "last_hidden_states", "verifier_last_hidden_states")
MASK = ("loss_mask",)
DTYPES = {"F16": np.float16, "F32": np.float32, "I64": np.int64, "I32": np.int32, "BOOL": np.bool_, "U8": np.uint8}


@dataclass
class Row:
    """One foreign file, in our terms."""

    name: str
    tokens: np.ndarray  # int32 [T]
    states: np.ndarray  # uint16 bf16 bits [T, n, H], or [T, 1, A*H] where the file joins its layers
    final: np.ndarray | None  # uint16 [T, H]; None where the last of `states` takes its place
    mask: np.ndarray | None  # bool [T]
    dtype: str


def files(path: str | Path) -> list[Path]:
    """The state files of a foreign folder, in the order of the numbers in their names."""
    found = [file for file in Path(path).rglob("*") if file.name.endswith(SUFFIXES) and file.is_file()]
    if not found:
        raise UsageError(f"{path}: neither a feature store nor a folder with {', '.join(SUFFIXES)} files.")
    return sorted(found, key=lambda file: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", str(file))])


def kind(file: Path) -> str:
    return "speculators" if file.name.endswith(".safetensors") else "torch"


def read(file: Path) -> Row:
    """Raises Damaged with the reason when the file is not a conversation's states."""
    tensors = _safetensors(file) if kind(file) == "speculators" else _pickle(file)
    names = {
        part: next((name for name in wanted if name in tensors), None)
        for part, wanted in (("tokens", TOKENS), ("aux", AUX), ("final", FINAL), ("mask", MASK))
    }
    if names["tokens"] is None or names["aux"] is None:
        raise Damaged(f"holds {sorted(tensors)}, expected token ids ({' or '.join(TOKENS)}) and hidden states")
    tokens = tensors[names["tokens"]][0].reshape(-1)
    states, dtype = tensors[names["aux"]]
    if states.ndim == 4 or (states.ndim == 3 and states.shape[0] == 1 and len(tokens) != 1):
        states = states[0]
    if states.ndim == 2:
        states = states[:, None]
    if states.ndim != 3:
        raise Damaged(f"hidden states {list(states.shape)}, expected [tokens, layers, hidden size]")
    if len(states) != len(tokens):
        if states.shape[1] == len(tokens):
            raise Damaged(f"axes swapped: hidden states {list(states.shape)} for {len(tokens)} tokens")
        raise Damaged(f"{len(states)} states for {len(tokens)} tokens: cut short (a prefix cache does this)")
    final = None
    if names["final"] not in (None, names["aux"]):
        final = tensors[names["final"]][0]
        final = final.reshape(-1, final.shape[-1])
        if len(final) != len(tokens):
            raise Damaged(f"{len(final)} final states for {len(tokens)} tokens")
    mask = tensors[names["mask"]][0].reshape(-1).astype(bool) if names["mask"] else None
    if mask is not None and len(mask) != len(tokens):
        raise Damaged(f"a loss mask of {len(mask)} for {len(tokens)} tokens")
    return Row(file.name.split(".")[0], tokens.astype(np.int32), states, final, mask, dtype)


def _safetensors(file: Path) -> dict[str, tuple[np.ndarray, str]]:
    """name -> (array, dtype); floats as bf16 bits."""
    try:
        header = read_header(file)
    except UsageError as error:
        raise Damaged(str(error).split(": ", 1)[-1]) from None
    header.pop("__metadata__", None)
    data = np.fromfile(file, np.uint8)
    data = data[8 + int(data[:8].view("<u8")[0]) :]
    end = max((int(item["data_offsets"][1]) for item in header.values()), default=0)
    if len(data) != end:
        raise Damaged(f"cut off: {len(data)} bytes of data, its header promises {end}")
    result = {}
    for name, item in header.items():
        start, stop = item["data_offsets"]
        dtype = "<u2" if item["dtype"] == "BF16" else DTYPES.get(item["dtype"])
        if dtype is None or np.dtype(dtype).itemsize * int(np.prod(item["shape"])) != stop - start:
            raise Damaged(f"tensor {name!r}: dtype {item['dtype']} and shape {item['shape']} do not fit its bytes")
        array = np.frombuffer(data[start:stop].tobytes(), dtype).reshape(item["shape"])
        result[name] = (to_bits(array) if array.dtype.kind == "f" else array, item["dtype"])
    return result


def _pickle(file: Path) -> dict[str, tuple[np.ndarray, str]]:
    import torch

    try:
        content = file.read_bytes()
        content = gzip.decompress(content) if file.name.endswith(".gz") else content
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise Damaged("holds objects other than tensors, or is damaged; it was not opened (weights_only)") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(f"cut off or damaged ({reason})") from None
    if not isinstance(value, dict):
        raise Damaged(f"holds a {type(value).__name__}, expected a dictionary of tensors")
    result = {}
    for name, tensor in value.items():
        if isinstance(tensor, list):
            tensor = torch.as_tensor(tensor)
        if isinstance(tensor, torch.Tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            if tensor.is_floating_point() and name not in MASK:
                array = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
            else:
                array = tensor.numpy()
            result[name] = (array, dtype)
    return result


def verify(path: str | Path, deep: bool = False, documents: Iterable[dict] | None = None) -> dict[str, Any]:
    """The contract's object for a foreign folder. Shapes, lengths, dtypes and layer counts always; `deep` adds values.

    `documents` (answers.jsonl rows in the order of the files' numbers): each file's tokens must be its document's.
    """
    rows, problems, total = {}, {}, 0
    found = files(path)
    names = {file: str(file.relative_to(path)) for file in found}
    texts = [list(document["tokens"]) for document in documents] if documents is not None else None
    with progress("verify", len(found), "files") as advance:
        for number, file in enumerate(found):
            total += file.stat().st_size
            try:
                row = read(file)
                rows[file] = (row.states.shape[1:], row.dtype)
                if deep and (reason := implausible(row.states)):
                    raise Damaged(reason)
                if deep and row.final is not None and (reason := implausible(row.final[:, None])):
                    raise Damaged(reason)
                if texts is not None:
                    place = int(m.group()) if (m := re.search(r"\d+$", row.name)) else number
                    if place >= len(texts) or list(row.tokens) != texts[place]:
                        raise Damaged(f"its tokens are not those of document {place}")
            except Damaged as damage:
                problems[file] = str(damage)
            advance(1)
    # What most files have is right; a file that differs was made with other layers or another dtype.
    usual = Counter(rows.values()).most_common(1)
    for file, what in rows.items():
        if file not in problems and what != usual[0][0]:
            (shape, dtype), (wanted, kind_wanted) = what, usual[0][0]
            problems[file] = (
                f"layers and width {list(shape)} in {dtype}, most files have {list(wanted)} in {kind_wanted}"
            )
    return {
        "samples": len(found),
        "ok": len(found) - len(problems),
        "bad": [{"sample": names[file], "reason": problems[file]} for file in found if file in problems],
        "bytes": total,
        "format": kind(found[0]),
    }


def import_(
    source: str | Path,
    path: str | Path,
    target: "LoadedTarget",
    *,
    layers: list[int],
    documents: list[dict[str, Any]] | None = None,
    codec: str = "bf16",
    threshold: float = THRESHOLD,
) -> dict[str, Any]:
    """Import a foreign folder into a store at `path`; files that are bad are left out and named.

    `layers` are the physical outputs out(v) of its auxiliary states, ascending (the files do not say). The target
    supplies the final norm, where the files hold the state before it, and the argmax. `documents` supply the mask
    where the files have none (matched by tokens). Returns imported, bad [{sample, reason}] and the store's figures.
    """
    width = target.target.hidden_size
    masks = {tuple(document["tokens"]): document for document in documents or []}
    from eyas.features.extract import open_writer

    bad: list[dict[str, str]] = []
    normed: bool | None = None
    found = files(source)
    with (
        open_writer(path, target, layers, codec, source=kind(found[0])) as store,
        progress("import", len(found), "files") as advance,
    ):
        for number, file in enumerate(found):
            advance(1)
            try:
                row = read(file)
                document = masks.get(tuple(row.tokens.tolist()))
                name = document["id"] if document else row.name
                if name in store.committed:
                    continue
                if row.tokens.min(initial=0) < 0 or row.tokens.max(initial=0) >= target.embedding.shape[0]:
                    raise Damaged("token id outside the target's vocabulary")
                mask = mask_of(document["spans"], len(row.tokens)) if document else row.mask
                if mask is None:
                    raise Damaged("no loss mask, and no document with these tokens")
                aux, final = _split(row, len(layers), width)
                if reason := implausible(aux) or implausible(final[:, None]):
                    raise Damaged(reason)
                expected = row.final is not None if normed is None else normed
                final, argmax, normed = _finish(target, row.tokens, mask, final, expected, normed is not None)
                store.append(Sample(name, row.tokens, mask, aux, final, argmax, (document or {}).get("category") or ""))
                if number % 32 == 31:
                    store.commit()
            except (Damaged, UsageError) as problem:
                bad.append({"sample": str(file.relative_to(source)), "reason": str(problem)})
        store.commit()
        figures = summary(store.entries.values())
        if figures["self_check"] is not None and figures["self_check"] < threshold:
            raise EyasError(
                f"{source}: the argmax of its final states is the next token at {figures['self_check']:.1%}, expected at "
                f"least {threshold:.0%}. Likely another target, another layer in the last place, a mask or states of "
                "other conversations, or answers that this target did not write greedily (then lower the threshold)."
            )
        store.finish(None, {"threshold": threshold})
    return {"imported": figures["samples"], "bad": bad, **figures}


def _split(row: Row, layers: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """aux [T, A, H] and final [T, H] from what the file holds."""
    length = len(row.tokens)
    if row.states.shape[1] * row.states.shape[2] % width:
        raise Damaged(f"states of width {row.states.shape[2]}, the target's hidden size is {width}")
    states = row.states.reshape(length, -1, width)
    count = states.shape[1] - (row.final is None)
    if count != layers:
        raise Damaged(f"{count} auxiliary layers, {layers} were named")
    return states[:, :layers], row.final if row.final is not None else states[:, -1]


def _finish(
    target: "LoadedTarget", tokens: np.ndarray, mask: np.ndarray, final: np.ndarray, normed: bool, settled: bool
) -> tuple[np.ndarray, np.ndarray, bool | None]:
    """The post-norm final states [F, H], the argmax [F], and whether the file's states already had the final norm.

    `normed` is what the layout says; until it is `settled` the other reading wins where it predicts clearly better.
    """
    import torch

    from eyas.features.extract import argmax

    at = teacher_positions(mask)
    states = torch.from_numpy(final[at].view(np.int16)).view(torch.bfloat16).to(target.device, target.dtype)  # [F, H]

    def reading(after: bool) -> tuple[int, torch.Tensor, np.ndarray]:
        value = states if after else target.body.norm(states)
        found = argmax(target, value).numpy()
        return int((found == tokens[at + 1]).sum()), value, found

    with torch.inference_mode():
        hits, value, best = reading(normed)
        if not settled:
            other = reading(not normed)
            if other[0] > hits + 0.05 * len(at):
                normed, (hits, value, best) = not normed, other
    bits = value.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits, best, normed if settled or len(at) >= 8 else None

"""One fault at a time, in the canary's draft: what check and load_as predict for an engine, and what the engine does.

`python tests/engines/faults.py [ENGINE ...]` tries every case in every engine whose environment is there and writes the
tables into docs/engines.md (make engine-table). What was seen is kept case by case, so that --resume goes on where a run
was cut off; --predict only predicts anew what was seen last, by it or by the tests.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")] if str(ROOT / "tests") not in sys.path else []

from serving_parts import absolute, edit, rename  # noqa: E402

from engines import llamacpp, openvino, sglang, vllm  # noqa: E402
from eyas.draft.batch import pack  # noqa: E402
from eyas.draft.model import Draft  # noqa: E402
from eyas.errors import EyasError  # noqa: E402
from eyas.serving import canary as c  # noqa: E402
from eyas.serving import names  # noqa: E402
from eyas.serving.check import check  # noqa: E402
from eyas.serving.contract import ENGINES  # noqa: E402
from eyas.serving.load import load_as  # noqa: E402
from eyas.target import LogitRule, Target, read_target  # noqa: E402

KEPT = ROOT / "build" / "engines"  # what each engine said last: one can be tried without the others
WORKERS = {"vllm": vllm.Vllm, "sglang": sglang.Sglang, "openvino": openvino.Openvino}  # those that are used in process
K, NEW = 3, 188
W, V, D = c.WIDTH, c.VOCAB, len(c.make([1, 5, 8]).map)
L = "midlayer."


def put(**keys: Any) -> Callable[[dict], Any]:
    return lambda config: config.update(keys)


def drop(*keys: str) -> Callable[[dict], Any]:
    return lambda config: [config.pop(key, None) for key in keys]


def lose(*found: str) -> Callable[[dict], Any]:
    return lambda state: [state.pop(name) for name in list(state) if name.startswith(found)]


def add(name: str, *shape: int, value: float = 1.0) -> Callable[[dict], Any]:
    return lambda state: state.update({name: torch.full(shape, value)})


def nested(*ids: int) -> Callable[[dict], Any]:
    return put(eagle_config={"eagle_aux_hidden_state_layer_ids": list(ids)})


def top(*ids: int) -> Callable[[dict], Any]:
    return put(eagle_aux_hidden_state_layer_ids=list(ids))


def unsorted(state: dict) -> None:
    state["d2t"][-20:-18] = state["d2t"][[-19, -20]] + torch.tensor([1, -1])


def noise(state: dict) -> None:
    state["embed_tokens.weight"] = torch.randn(V, W, generator=torch.Generator().manual_seed(2)) * 0.02


def embedding() -> torch.Tensor:
    return torch.from_numpy(np.stack([c.stream(c.make([1, 5, 8]), token, -1) for token in range(V)]))


def token_before(state: dict) -> None:
    cycle = c.make([1, 5, 8]).cycle
    state["embed_tokens.weight"] = embedding()
    state["embed_tokens.weight"][cycle] = embedding()[np.roll(cycle, 1)]


def own(state: dict) -> None:
    state["embed_tokens.weight"] = embedding() * 0.9  # trained a little: reads as well as before


Change = tuple[Callable[[dict], Any] | None, Callable[[dict], Any] | None]
# name -> (what is changed in config.json, what in the tensors)
CASES: dict[str, Change] = {
    "nothing": (None, None),
    # names
    "layers.0.* names": (None, rename("midlayer.", "layers.0.")),
    "model.layers.0.* names": (None, rename("midlayer.", "model.layers.0.")),
    "layers.1.* names": (None, rename("midlayer.", "layers.1.")),
    "layer.0.* names": (None, rename("midlayer.", "layer.0.")),
    "model. before fc": (None, rename("fc.", "model.fc.")),
    "model. before midlayer": (None, rename("midlayer.", "model.midlayer.")),
    "model. before d2t": (None, rename("d2t", "model.d2t")),
    "model. before lm_head": (None, rename("lm_head", "model.lm_head")),
    "model. before norm": (None, rename("norm", "model.norm")),
    "_orig_mod. before all": (None, rename("", "_orig_mod.")),
    "unknown tensor": (None, add("extra.weight", 3)),
    "teacher's head": (None, add("verifier_lm_head.weight", D, W)),
    "rotary_emb.inv_freq": (None, add(f"{L}self_attn.rotary_emb.inv_freq", 16)),
    # tensors that are missing, or too many
    "no fc": (None, lose("fc.")),
    "no layer matrices": (None, lose(f"{L}self_attn", f"{L}mlp")),
    "no up_proj": (None, lose(f"{L}mlp.up_proj")),
    "no norm": (None, lose("norm.")),
    "no hidden_norm": (None, lose(f"{L}hidden_norm")),
    "no input_layernorm": (None, lose(f"{L}input_layernorm")),
    "no lm_head": (None, lose("lm_head")),
    "q_proj.bias": (None, add(f"{L}self_attn.q_proj.bias", 128)),
    "fc.bias": (None, add("fc.bias", W)),
    "fc.bias, bias true": (put(bias=True), add("fc.bias", W, value=0.0)),
    "q_norm": (None, add(f"{L}self_attn.q_norm.weight", 32)),
    "input_norm, flag off": (None, add("input_norm.weight", 3 * W)),
    "fc_norm, flag off": (None, lambda s: s.update({f"fc_norm.{i}.weight": torch.ones(W) for i in range(3)})),
    "NaN in fc": (None, lambda s: s["fc.weight"].fill_(float("nan"))),
    # the map
    "no map": (None, lose("d2t", "t2d")),
    "map of zeros": (None, lambda s: s["d2t"].zero_()),
    "absolute map": (None, absolute),
    "short map": (None, lambda s: s.update(d2t=s["d2t"][:-20])),
    "map out of range": (None, lambda s: s["d2t"].__setitem__(-2, 999)),
    "unsorted map": (None, unsorted),
    "doubled map": (None, lambda s: s["d2t"].__setitem__(-20, s["d2t"][-21] - 1)),
    "float map": (None, lambda s: s.update(d2t=s["d2t"].float())),
    "int32 map": (None, lambda s: s.update(d2t=s["d2t"].int())),
    "no t2d": (None, lose("t2d")),
    # embedding and head
    "own embedding": (None, own),
    "random embedding": (None, noise),
    "embedding with 5 rows more": (
        None,
        lambda s: s.update({"embed_tokens.weight": torch.cat([embedding(), torch.ones(5, W)])}),
    ),
    "embedding with 5 rows less": (None, lambda s: s.update({"embed_tokens.weight": embedding()[:-5].clone()})),
    "tied head": (put(tie_word_embeddings=True), None),
    # the config
    "another architecture": (put(architectures=["Qwen2ForCausalLM"]), None),
    "the target's architecture": (put(architectures=["LlamaForCausalLM"]), None),
    "vLLM's architecture": (put(architectures=["Eagle3LlamaForCausalLM"]), None),
    "no architectures": (drop("architectures"), None),
    "no model_type": (drop("model_type"), None),
    "no draft_vocab_size": (drop("draft_vocab_size"), None),
    "null draft_vocab_size": (put(draft_vocab_size=None), None),
    "draft_vocab_size one less": (put(draft_vocab_size=D - 1), None),
    "vocab_size one more": (put(vocab_size=V + 1), None),
    "vocab_size one less": (put(vocab_size=V - 1), None),
    "no num_hidden_layers": (drop("num_hidden_layers"), None),
    "two layers in the config": (put(num_hidden_layers=2), None),
    "null target_hidden_size": (put(target_hidden_size=None), None),
    "null use_cache": (put(use_cache=None), None),
    "one key/value head": (put(num_key_value_heads=1), None),
    "five heads": (put(num_attention_heads=5), None),
    "two heads of four": (put(num_attention_heads=2), None),
    "intermediate_size half": (put(intermediate_size=4 * c.CYCLE), None),
    "fc transposed": (None, lambda s: s.update({"fc.weight": s["fc.weight"].T})),
    "context of 64": (put(max_position_embeddings=64), None),
    "no dtype": (drop("dtype", "torch_dtype"), None),
    "gelu": (put(hidden_act="gelu"), None),
    "no rope_theta": (drop("rope_theta", "rope_parameters"), None),
    "mrope": (lambda config: config["rope_parameters"].update(mrope_section=[2, 3, 3]), None),
    # flags
    "norm_before_residual true": (put(norm_before_residual=True), None),
    "norm_output true": (put(norm_output=True), None),
    "norm_before_fc true, no tensor": (put(norm_before_fc=True), None),
    "norm_before_fc nested only": (put(eagle_config={"norm_before_fc": True}), add("input_norm.weight", 3 * W)),
    "fc_norm true": (put(fc_norm=True), lambda s: s.update({f"fc_norm.{i}.weight": torch.ones(W) for i in range(3)})),
    "use_aux_hidden_state false": (put(eagle_config={"use_aux_hidden_state": False}), None),
    # layers: the draft reads out(1), out(5), out(8), the default
    "ids top level only": (top(2, 6, 9), None),
    "ids nested only": (nested(1, 5, 8), None),
    "other ids top level only": (top(1, 5, 10), None),
    "other ids nested only": (nested(0, 4, 9), None),
    "SGLang's ids at the top": (top(1, 5, 8), None),
    "vLLM's ids nested": (nested(2, 6, 9), None),
    "ids in descending order": (top(9, 6, 2), None),
    "four ids": (top(2, 4, 6, 9), None),
    "two ids": (top(2, 6), None),
    "four nested ids": (nested(1, 3, 5, 8), None),
    "the last layer, top level": (top(2, 6, 12), None),
    "the last layer, nested": (nested(1, 5, 11), None),
    "an id beyond the last layer": (top(2, 6, 13), None),
    "num_aux_hidden_states 4": (put(num_aux_hidden_states=4), None),
}


def cut(wire: c.Wire) -> Change:
    """A wire of the canary broken in a draft's folder. Engines cannot be made to shift their states by a folder."""

    def tensors(state: dict) -> None:
        inner = {names.from_any(name): tensor for name, tensor in state.items()}
        try:
            wire.tensors(inner)
        except KeyError:  # the folder leaves the embedding to the target
            state["embed_tokens.weight"] = inner["embed_tokens.weight"] = embedding()
            wire.tensors(inner)
        blocks = inner["fc.weight"].chunk(3, 1)
        state["fc.weight"] = torch.cat([blocks[wire.blocks.index(layer)] for layer in range(3)], 1)

    def config(raw: dict) -> None:
        raw.update(wire.flags)
        if wire.layer:
            nested(*(v + wire.layer for v in (1, 5, 8)))(raw)
            top(*(v + wire.layer + 1 for v in (1, 5, 8)))(raw)

    return config, tensors


WIRES = {f"wire: {wire.says}": wire for wire in c.WIRES[1:] if not wire.late}
CASES |= {name: cut(wire) for name, wire in WIRES.items()}
# what `make test` tries; EYAS_ENGINES=all (make test-engines) tries everything
QUICK = ["nothing", "layers.0.* names", "model. before fc", "no fc", "fc.bias", "no map", "absolute map", "no lm_head",
         "own embedding", "other ids nested only", "ids in descending order", "two layers in the config",
         *list(WIRES)[-2:]]  # fmt: skip
# What OpenVINO makes of a folder is decided by its exporter, some seconds each: the cases in which it may differ.
OPENVINO = [
    "nothing", "layers.0.* names", "model. before fc", "unknown tensor", "no fc", "no norm", "no lm_head", "no map",
    "absolute map", "unsorted map", "random embedding", "vLLM's architecture", "no draft_vocab_size", "q_proj.bias",
    "two layers in the config", "other ids top level only", "norm_before_residual true", "norm_output true",
    "norm_before_fc true, no tensor", "fc_norm true",
]  # fmt: skip
# the wire that the canary's acceptance must name, where a case breaks one (in any engine that serves it)
NAMED = {
    "nothing": "right", "no fc": "fc", "no layer matrices": "layer", "no hidden_norm": "norms", "no norm": "norms",
    "no input_layernorm": "norms", "no lm_head": "head", "no map": "map", "map of zeros": "map", "NaN in fc": "head",
    "random embedding": "embedding", "norm_before_residual true": "norms", "norm_output true": "norms",
    "SGLang's ids at the top": "layers", "vLLM's ids nested": "layers", "other ids top level only": "layers",
    "other ids nested only": "layers", "ids in descending order": "order",
} | {name: wire.name for name, wire in WIRES.items()}  # fmt: skip
# A config that contradicts how the draft was trained: no file shows it, so check cannot; load_as gives the right figure.
LIES = {
    "SGLang's ids at the top", "vLLM's ids nested", "other ids top level only", "other ids nested only",
    "ids in descending order", "norm_before_residual true", "norm_output true", "gelu",
    "use_aux_hidden_state false", "four nested ids", *WIRES,
    "norm_before_fc nested only", "fc_norm true", "the last layer, top level", "the last layer, nested",
    "an id beyond the last layer",
    "embedding with 5 rows less",  # not met by the canary's text
}  # fmt: skip
# Half of an answer or all of it is lost, so that tokens score the same and rounding decides: counts are near, not equal.
TIES = {"one key/value head", "two heads of four", "intermediate_size half", "no lm_head",
        "wire: the draft reads the token after the next"}  # fmt: skip
# What the harness leaves out: the buffers of SGLang's CUDA graphs, which these ids size for another number of layers, and
# the rows of positions that its model runner makes.
UNRUN = {("sglang", "four ids"), ("sglang", "two ids"), ("sglang", "mrope")}


# What becomes of an answer's end: its last rounds are "whole" like the others; "short", they draft no more than what is
# left minus one; and "left out", they are short and the very last one is not counted.
LAST_ROUND = {"vllm": "whole", "sglang": "whole", "llamacpp": "short", "openvino": "left out"}


def count(rounds: Iterator[tuple[int, Sized]], new: int, k: int, rule: str) -> dict:
    """Drafted, accepted and accepted per position of rounds (tokens kept, tokens guessed), until `new` are written."""
    made, drafted, positions = 1, 0, [0] * k
    while made < new:
        right, guessed = next(rounds)
        want = len(guessed) if rule == "whole" else min(len(guessed), new - made - 1)
        right = min(right, want)
        made += right + 1
        if made >= new and rule == "left out":
            break
        drafted += want
        for position in range(right):
            positions[position] += 1
    return {"drafted": drafted, "accepted": sum(positions), "per_position": positions}


def simulate(config: Any, state: dict, rule: str) -> dict:
    """The counts of this draft on the canary's text, under an engine's rule for the last round."""
    canary = c.make([1, 5, 8])
    text = c.sample(canary, list(config.aux_layers), 4 + NEW + 2 * K)
    draft = Draft(config)
    draft.load_state_dict(state)
    ids = torch.arange(config.draft_vocab_size)
    reached = draft.target_ids(ids)
    table = torch.full((V,), -1)
    table[reached[(reached >= 0) & (reached < V)]] = ids[(reached >= 0) & (reached < V)]
    with torch.no_grad():
        found = draft.unroll(pack([text]).to("cpu", torch.float32), K, None, LogitRule(), table)
    kept = dict(zip(found.rows.tolist(), found.accepted.tolist(), strict=True))

    def rounds() -> Iterator[tuple[int, Sized]]:
        row = 3
        while True:
            yield kept[row], range(K)
            row += kept[row] + 1

    return count(rounds(), NEW, K, rule)


def predict(folder: Path, target: Target, engine: str) -> dict:
    """{"check": outcome in a word, "severity", "load_as": counts or {"error"}, "random": do the counts depend on luck}."""
    findings = check(folder, target, [engine])["verdicts"][engine]["findings"]
    told = [f for f in findings if f["severity"] != "info"]
    outcome = next(
        (f["outcome"] for f in told if f["outcome"].startswith("raises")), told[0]["outcome"] if told else "fine"
    )
    notes: list[str] = []
    try:
        config, state, notes = load_as(folder, target, engine)
        counts = simulate(config, state, LAST_ROUND[engine])
    except EyasError as error:
        counts = {"error": str(error)}
    return {
        "check": outcome, "rules": [f["rule"] for f in told], "errors": [f["outcome"] for f in told if f["severity"] == "error"],
        "load_as": counts, "random": any(f["outcome"] == "random" for f in told) or any("random values stand in" in note for note in notes),
    }  # fmt: skip


class Bench:
    """A canary in a folder and one engine that serves broken copies of its draft."""

    def __init__(self, folder: Path, engine: str, serve: Callable[[Path, Path], dict]) -> None:
        self.folder, self.engine, self.serve = folder, engine, serve
        self.prompt = c.make([1, 5, 8]).cycle[:4]
        self.target = read_target(folder / "target")

    def broken(self, name: str) -> Path:
        out = self.folder / f"broken-{list(CASES).index(name)}"  # each its own: engines remember the config of a path
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.folder / "draft", out)
        (out / "eyas.json").unlink()
        return edit(out, *CASES[name])

    def row(self, name: str) -> dict:
        """Prediction and observation of one case: {"case", "engine", **predict(), "seen": counts or {"error", "stage"}}."""
        draft = self.broken(name)
        found = predict(draft, self.target, self.engine) | {"seen": self.serve(self.target.path, draft)}
        shutil.rmtree(draft)
        row = {"case": name, "engine": self.engine} | found
        keep(self.engine, kept(self.engine) | {name: row})
        return row


def kept(engine: str) -> dict[str, dict]:
    """case -> its row when it was last tried, by `main` or by the tests."""
    file = KEPT / f"{engine}.json"
    return {row["case"]: row for row in json.loads(file.read_text())} if file.exists() else {}


def keep(engine: str, rows: dict[str, dict]) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    found = [rows[name] for name in cases(engine) if name in rows]
    (KEPT / f"{engine}.json").write_text(json.dumps(found, indent=1))


@contextmanager
def bench(engine: str, folder: Path) -> Iterator[Bench]:
    """The canary's target served by a real engine; see `available`."""
    torch.set_num_threads(1)
    c.write(folder, engine)
    prompt = c.make([1, 5, 8]).cycle[:4]
    if engine == "llamacpp":
        with llamacpp.Converter() as convert:
            if said := convert(folder / "target", folder / "target.gguf"):
                raise RuntimeError(said)

            def serve(_: Path, draft: Path) -> dict:
                if said := convert(draft, folder / "draft.gguf", folder / "target"):
                    return {"error": said, "stage": "load"}
                stage = "load"
                try:
                    with llamacpp.serving(folder / "target.gguf", folder / "draft.gguf", K) as url:
                        stage = "late"
                        return llamacpp.complete(url, prompt, NEW, K)
                except (RuntimeError, OSError) as error:
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    return {"error": lines[-1], "stage": stage}

            yield Bench(folder, engine, serve)
        return
    with WORKERS[engine]() as run:

        def serve(target: Path, draft: Path) -> dict:
            found = run(target, draft, [prompt], NEW, K, folder / "log")
            return found["answers"][0] if "answers" in found else found

        yield Bench(folder, engine, serve)


def available() -> list[str]:
    there = {"llamacpp": llamacpp.server(), "vllm": vllm.PYTHON, "sglang": sglang.PYTHON, "openvino": openvino.PYTHON}
    return [engine for engine, path in there.items() if path is not None and path.exists()]


def cases(engine: str) -> list[str]:
    return OPENVINO if engine == "openvino" else list(CASES)


def not_computed(counts: dict) -> bool:
    """load_as says that our draft has no place for what the engine runs."""
    return any(
        words in counts.get("error", "") for words in ("for which eyas", "instead of auxiliary", "no store holds")
    )


def judge(row: dict, right: dict) -> str:
    """ "" when what was predicted is what was seen; else what differs. `right`: the counts of the whole draft."""
    seen, predicted = row["seen"], row["load_as"]
    if (row["engine"], row["case"]) in UNRUN:
        return ""
    if "error" in seen:
        expected = "raises late" if seen["stage"] == "late" else "raises"
        return "" if row["check"] == expected else f"it {expected}: {seen['error'][:100]}"
    if "error" in predicted:
        return "" if not_computed(predicted) and "raises" not in row["check"] else "it did not raise"
    if not seen["drafted"]:
        return "" if row["errors"] else "it drafted nothing and check said no error"
    told = [key for key in ("drafted", "accepted", "per_position") if key in seen]
    if row["random"] or "MAXPOS" in row["rules"]:
        return ""
    if row["case"] in TIES and abs(seen["accepted"] - predicted["accepted"]) <= seen["drafted"] / 8:
        return ""
    if wrong := [key for key in told if seen[key] != predicted[key]]:
        return ", ".join(f"{key} {seen[key]} instead of {predicted[key]}" for key in wrong)
    if row["case"] in LIES:
        return ""
    harmed = seen["accepted"] != right["accepted"]
    if harmed and row["check"] in ("fine", "harmless"):
        return "acceptance was lost and check said nothing"
    if not harmed and set(row["errors"]) - {"drops"}:
        return "nothing was lost and check said error"
    return ""


def rates(row: dict) -> list[float]:
    """Acceptance per position that was seen; [] where it raised, or where the engine tells no positions."""
    rounds = max(row["seen"].get("drafted", 0) // K, 1)
    return [n / rounds for n in row["seen"].get("per_position", [])]


def named(row: dict) -> str:
    """The wire that the canary names for what was seen, or "" where nothing was."""
    return c.diagnose(rates(row), [1, 5, 8])[0].name if rates(row) else ""


def well_named(row: dict) -> bool:
    """The canary says which wire it is; of memory that was left as it was nobody can tell what it looks like."""
    return row["random"] or named(row) in ("", "right", NAMED.get(row["case"], named(row)))


def figure(counts: dict) -> str:
    if "error" in counts:
        late = " at the first token" if counts.get("stage") == "late" else ""
        return "not computed" if not_computed(counts) else f"raises{late}"
    return f"{1 + counts['accepted'] / (counts['drafted'] / K):.2f}" if counts["drafted"] else "drafts nothing"


def table(rows: list[dict]) -> str:
    """Markdown: a line a case, three columns an engine."""
    found = {(row["engine"], row["case"]): row for row in rows}
    engines = [engine for engine in LAST_ROUND if (engine, "nothing") in found]
    lines = ["| fault | " + " | ".join(f"{ENGINES[e].title}: check | load_as | seen" for e in engines) + " |"]
    lines.append("|---|" + "---|---|---|" * len(engines))
    for name in [name for name in CASES if name not in WIRES]:
        cells = []
        for engine in engines:
            if (row := found.get((engine, name))) is None:
                cells.append("| |")
                continue
            wrong = judge(row, found[engine, "nothing"]["seen"])
            note = "‡" if "MAXPOS" in row["rules"] and "error" not in row["seen"] else ""
            mark = " **≠**" if wrong else " †" if (engine, name) in UNRUN else f" {note}".rstrip()
            luck = "about " if (row["random"] or name in TIES) and "error" not in row["load_as"] else ""
            cells.append(f"{row['check']} | {luck}{figure(row['load_as'])} | {figure(row['seen'])}{mark}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def wires(rows: list[dict]) -> str:
    """Markdown: every wire of the canary broken once in every engine, what was accepted, and which wire it names."""
    found = {(row["engine"], row["case"]): row for row in rows}
    engines = [engine for engine in LAST_ROUND if rates(found.get((engine, "nothing"), {"seen": {}}))]
    lines = ["| broken | " + " | ".join(f"{ENGINES[e].title}: accepted | named" for e in engines) + " |"]
    lines.append("|---|" + "---|---|" * len(engines))
    for name in ["nothing", *WIRES]:
        cells = []
        for engine in engines:
            row = found.get((engine, name))
            if row is None or "error" in row["seen"]:
                cells.append("| " if row is None else "raises |")
                continue
            told = " ".join(f"{rate:.2f}" for rate in rates(row)) + f" | {named(row)}"
            cells.append(told + ("" if well_named(row) else " **≠**"))
        says = name if name == "nothing" else f"{WIRES[name].says} ({WIRES[name].name})"
        lines.append(f"| {says} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_docs(made: dict[str, str]) -> None:
    """Tables into docs/engines.md, each between its markers."""
    page = ROOT / "docs" / "engines.md"
    text = page.read_text("utf-8")
    for mark, new in made.items():
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        text = f"{before}<!-- {mark} -->\n{new}\n<!-- end of {mark} -->{rest.partition(f'<!-- end of {mark} -->')[2]}"
    page.write_text(text, "utf-8")


def again() -> None:
    """Predict anew what was seen before: after a change of the contract, without the engines."""
    for engine in [engine for engine in LAST_ROUND if kept(engine)]:
        with tempfile.TemporaryDirectory() as folder:
            c.write(Path(folder), engine)
            made = Bench(Path(folder), engine, lambda *_: {})
            keep(engine, {n: row | predict(made.broken(n), made.target, engine) for n, row in kept(engine).items()})


def try_in(engine: str) -> None:
    """Every case that is not kept."""
    start, left = time.monotonic(), [name for name in cases(engine) if name not in kept(engine)]
    with tempfile.TemporaryDirectory() as folder, bench(engine, Path(folder)) as made:
        for name in left:
            row = made.row(name)
            said = judge(row, kept(engine)["nothing"]["seen"]) or ("" if well_named(row) else f"named {named(row)}")
            print(engine, name, row["check"], figure(row["load_as"]), figure(row["seen"]), said, sep=" | ", file=sys.stderr, flush=True)  # fmt: skip
    print(f"{engine}: {len(left)} cases in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "engines", nargs="*", metavar="ENGINE", help="those whose environment is there, if none is named"
    )
    parser.add_argument("--resume", action="store_true", help="try only what was not seen yet")
    parser.add_argument("--predict", action="store_true", help="try nothing: predict anew what was seen last")
    given = parser.parse_args()
    if given.predict:
        again()
    for engine in [] if given.predict else given.engines or available():
        if not given.resume:
            keep(engine, {})
        try_in(engine)
    rows = [row for engine in LAST_ROUND for row in kept(engine).values()]
    right = {row["engine"]: row["seen"] for row in rows if row["case"] == "nothing"}
    wrong = [row for row in rows if judge(row, right[row["engine"]]) or not well_named(row)]
    write_docs({"table": table(rows), "wires": wires(rows)})
    print(f"{len(rows)} cases, {len(wrong)} not as predicted", file=sys.stderr)


if __name__ == "__main__":
    main()

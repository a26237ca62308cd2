"""The doctor on real broken cases: each is broken on purpose, and named; nothing sound is called certainly broken."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import save_tiny_target
from safetensors.torch import load_file, save_file

from eyas.doctor import case_from, examine
from eyas.errors import UsageError


def run(folder: Path, target: Path, **changes) -> Path:
    """A finished run on a tiny target."""
    rows = [{"turns": [f"Tell me about {word} number {i}."]} for i in range(30) for word in ("cats", "rivers")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": str(target),
        "run": str(folder / "run"),
        "conversations": {"path": str(folder / "prompts.jsonl"), "heldout": 0.2},
        "generate": {"max_new_tokens": 40},
        "vocab": {"size": 250},
        "draft": {"num_key_value_heads": 4},
        "train": {"steps": 3, "epochs": 4, "batch_tokens": 300, "lr": 1e-3, "start": "least_squares"},
        "export": {"embed": True},
        "replay": {"k": 3},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))
    command = [sys.executable, "-m", "eyas", "run", str(folder / "recipe.yaml"), "--accept", "a test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_target) -> Path:
    return run(tmp_path_factory.mktemp("doctor"), tiny_target)


class Broken:
    """A copy of the trained draft to break, and the options under which the doctor sees it."""

    def __init__(self, trained: Path, folder: Path, target: Path) -> None:
        self.trained, self.folder, self.target = trained, folder, target
        shutil.copytree(trained / "draft", folder / "draft")
        self.options: dict = {"engine": "sglang"}
        self.measured: dict | None = None

    def tensors(self, change) -> None:
        file = self.folder / "draft" / "model.safetensors"
        state = change(load_file(file))
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)

    def config(self, change) -> None:
        file = self.folder / "draft" / "config.json"
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    def other_target(self) -> Path:
        self.target = shutil.copytree(self.target, self.folder / "target")
        return self.target

    def examined(self) -> dict:
        o, measured = self.options, self.folder / "measured.json" if self.measured else None
        if measured:
            measured.write_text(json.dumps(self.measured))
        draft, target = self.folder / "draft", str(self.target)
        return examine(case_from(self.trained, draft, target, o.get("engine"), o.get("launch"), None, measured))


def dropped(b: Broken) -> None:
    b.options["engine"] = "openvino"
    b.tensors(lambda s: {n.replace("midlayer.", "layers.0."): t for n, t in s.items()})


def wrapped(b: Broken) -> None:
    b.tensors(lambda s: {f"_orig_mod.{n}": t for n, t in s.items()})


def algorithm(b: Broken) -> None:
    b.options["launch"] = "python -m sglang.launch_server --speculative-algorithm EAGLE --speculative-num-steps 3"


def method(b: Broken) -> None:
    b.options = {"launch": """vllm serve t --speculative-config '{"method": "eagle", "model": "d"}'"""}


def layers(b: Broken) -> None:
    from eyas.serving.contract import nested_ids
    from eyas.target import default_aux_layers, read_target

    target = read_target(b.target)
    right = nested_ids(default_aux_layers(target.num_layers), target)
    b.config(lambda c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [i + 1 for i in right]}))


def absolute(b: Broken) -> None:
    b.tensors(lambda s: s | {"d2t": s["d2t"] + torch.arange(len(s["d2t"]))})


def missing(b: Broken) -> None:
    b.tensors(lambda s: {n: t for n, t in s.items() if n not in ("d2t", "t2d")})


def short(b: Broken) -> None:
    b.tensors(lambda s: s | {"d2t": s["d2t"][:-1]})


def regenerated(b: Broken) -> None:
    def change(s):
        size = len(s["d2t"])
        ids = torch.cat([torch.arange(3), torch.arange(300 - (size - 3), 300)])
        t2d = torch.zeros(300, dtype=torch.bool)
        t2d[ids] = True
        return s | {"d2t": ids - torch.arange(size), "t2d": t2d}

    b.tensors(change)


def head(b: Broken) -> None:
    from eyas.target import read_target

    rows = read_target(b.target).read_tensor("lm_head.weight")
    b.tensors(lambda s: s | {"lm_head.weight": rows[s["d2t"] + torch.arange(len(s["d2t"]))]})


def embedding(b: Broken) -> None:
    b.options["engine"] = "vllm"
    b.tensors(lambda s: s | {"embed_tokens.weight": torch.randn(300, 64) * 0.02})


def trained_away(b: Broken) -> None:
    from eyas.target import read_target

    b.options["engine"] = "vllm"
    own = read_target(b.target).read_tensor("model.embed_tokens.weight")
    b.tensors(lambda s: s | {"embed_tokens.weight": own + 0.3 * own.std() * torch.randn(own.shape)})


def bypassed(b: Broken) -> None:
    b.config(lambda c: c.update(eagle_config=c.get("eagle_config", {}) | {"use_aux_hidden_state": False}))


def norm(b: Broken) -> None:
    b.options["engine"] = "vllm"
    b.config(lambda c: c.update(norm_before_residual=True))


def rope(b: Broken) -> None:
    def change(c):
        if "rope_parameters" in c:
            c["rope_parameters"] = c["rope_parameters"] | {"rope_theta": 1e6}
        if "rope_theta" in c:
            c["rope_theta"] = 1e6

    b.config(change)


def template(b: Broken) -> None:
    from conftest import CHATML

    other = b.other_target()
    for file in other.glob("chat_template.jinja"):
        file.write_text(CHATML.replace("You are brief.", "You are a pirate."))
    file = other / "tokenizer_config.json"
    value = json.loads(file.read_text())
    if "chat_template" in value:
        file.write_text(json.dumps(value | {"chat_template": CHATML.replace("brief", "a pirate")}))


def thinking(b: Broken) -> None:
    b.options["launch"] = (
        """sglang --speculative-algorithm EAGLE3 --chat-template-kwargs '{"enable_thinking": false}'"""
    )


def revision(b: Broken) -> None:
    other = b.other_target()
    shutil.rmtree(other)
    b.target = save_tiny_target(other, seed=3)


def quantised(b: Broken) -> None:
    revision(b)
    file = b.target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))


def benchmark(b: Broken) -> None:
    protocol = {"k": 3, "data": "arena.jsonl", "prompts": 80, "temperature": 0.0, "shape": "chain"}
    b.measured = {"tau": 1.02, "protocol": protocol}


CASES = {
    dropped: "weights dropped by name",
    wrapped: "weights dropped by name",
    algorithm: "wrong algorithm flag",
    method: "wrong algorithm flag",
    layers: "auxiliary layers differ",
    absolute: "vocabulary map",
    missing: "vocabulary map",
    short: "vocabulary map",
    regenerated: "vocabulary map",
    head: "head replaced",
    embedding: "embedding",
    trained_away: "embedding",
    bypassed: "fc bypassed",
    norm: "norm placement",
    rope: "RoPE differs",
    template: "chat template differs",
    thinking: "thinking mode differs",
    revision: "another target",
    quantised: "quantised target",
    benchmark: "the benchmark asks for something else",
}
# What is true of these cases besides: few conversations, and a file that is not the run's export any more.
BESIDES = {"little data", "not the draft that was trained"}


@pytest.mark.parametrize("breaking", CASES, ids=lambda breaking: breaking.__name__)
def test_a_broken_case_is_named(breaking, trained, tiny_target, tmp_path):
    broken = Broken(trained, tmp_path, tiny_target)
    breaking(broken)
    found = broken.examined()
    named = [(cause["cause"], cause["confidence"]) for cause in found["causes"]]
    wanted = CASES[breaking]
    first = [cause for cause, _ in named if cause not in BESIDES]
    assert first and first[0] == wanted, named
    wrong = {cause for cause, confidence in named if confidence == "certain"} - {wanted} - BESIDES
    assert not wrong, named
    assert all(cause["evidence"] and cause["fix"] for cause in found["causes"])


def test_a_sound_draft_has_no_fault(trained, tiny_target, tmp_path):
    broken = Broken(trained, tmp_path, tiny_target)
    for engine in ("sglang", "vllm", "llamacpp"):
        broken.options = {"engine": engine, "launch": "server --speculative-algorithm EAGLE3"}
        found = broken.examined()
        assert {cause["cause"] for cause in found["causes"]} <= {"little data"}, found
        assert any("nothing is lost in loading" in line for line in found["checked"]), found
        assert any("bit for bit" in line for line in found["checked"])


def test_the_same_draft_in_another_layout_has_no_fault(trained, tiny_target, tmp_path):
    from eyas.serving.export import export, load_draft
    from eyas.target import read_target

    target = read_target(tiny_target)
    config, state = load_draft(trained / "draft", target)
    export(state, config, target, tmp_path / "draft", provenance={}, layout="speculators", embed=True)
    found = examine(case_from(trained, tmp_path / "draft", str(tiny_target), None, None, None, None))
    assert {cause["cause"] for cause in found["causes"]} <= {"little data"}, found
    assert any("bit for bit" in line for line in found["checked"])


def measured(trained, tiny_target, folder, tau: float, data: str, **changes) -> dict:
    protocol = {"k": 3, "data": data, "prompts": 12, "temperature": 0.0, "shape": "chain"} | changes
    (folder / "measured.json").write_text(json.dumps({"tau": tau, "protocol": protocol}))
    return examine(case_from(trained, None, str(tiny_target), None, None, None, folder / "measured.json"))


def test_a_figure_that_nothing_explains_is_said_to_be_so(trained, tiny_target, tmp_path):
    """Fewer tokens accepted on the very conversations of the replay: something is wrong, though no file shows it."""
    low = measured(trained, tiny_target, tmp_path, 1.0, "held-out conversations")
    assert [c for c in low["causes"] if c["cause"] == "not explained"], low
    high = measured(trained, tiny_target, tmp_path, 3.9, "held-out conversations")
    assert any("it is no less" in line for line in high["checked"]), high
    assert not any("agree" in line for line in low["checked"] + high["checked"])
    warm = measured(trained, tiny_target, tmp_path, 1.0, "held-out conversations", temperature=0.7)
    assert any("temperature 0.7" in line for cause in warm["causes"] for line in cause["evidence"]), warm


def test_a_tree_is_compared_with_trees(trained, tiny_target, tmp_path):
    """Of more guesses at once more are right, so that a chain's figure would agree with one that is too low."""
    from eyas.decode.replay import replay
    from eyas.decode.tree import Tree
    from eyas.features.store import Store
    from eyas.target import read_target

    parts = json.loads((trained / "conversations" / "split.json").read_text())
    tree = {"total": 12, "depth": 3, "topk": 4}
    store, target = Store(trained / "store"), read_target(tiny_target)
    ids = parts["heldout"][:12]  # as many as `measured` says
    wanted = replay(trained / "draft", target, store, Tree(**tree), ids, "")[1]["tau"]
    found = measured(trained, tiny_target, tmp_path, 1.0, "held-out conversations", shape="tree", tree=tree)
    assert any(f"replayed {wanted:.2f}" in line for cause in found["causes"] for line in cause["evidence"]), found


def test_the_replay_is_of_the_conversations_that_were_measured(trained, tiny_target, tmp_path):
    parts = json.loads((trained / "conversations" / "split.json").read_text())
    assert len(parts["heldout"]) > 2
    protocol = {"k": 3, "data": "held-out conversations", "prompts": 2, "temperature": 0.0, "shape": "chain"}
    (tmp_path / "m.json").write_text(json.dumps({"tau": 1.0, "protocol": protocol}))
    case = case_from(trained, None, str(tiny_target), None, None, None, tmp_path / "m.json")
    assert case.own["protocol"]["prompts"] == 2
    whole = case_from(trained, None, str(tiny_target), None, None, None, None)
    assert whole.own["protocol"]["prompts"] == len(parts["heldout"])


def test_nothing_is_proved_by_no_conversations(trained, tiny_target, tmp_path):
    """A store without the held-out conversations: their replay would be a tau of 1.0, and agree with any figure."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    file = run / "conversations" / "split.json"
    parts = json.loads(file.read_text())
    file.write_text(json.dumps({"train": parts["train"], "heldout": ["gone"]}))
    (tmp_path / "measured.json").write_text(json.dumps({"tau": 1.5, "protocol": {"k": 3}}))
    found = examine(case_from(run, None, str(tiny_target), "sglang", None, None, tmp_path / "measured.json"))
    assert not any("tau" in line for line in found["checked"]), found


def test_a_torn_log_is_read(trained, tiny_target, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    with open(run / "train" / "log.jsonl", "a") as log:
        log.write('{"step": 9')
    before, after = (examine(case_from(r, None, str(tiny_target), None, None, None, None)) for r in (trained, run))
    assert after["causes"] == before["causes"]


def test_what_cannot_be_read_is_one_sentence(trained, tmp_path):
    def case(**options):
        names = ("draft", "target", "engine", "launch", "log", "measured")
        return case_from(trained, *(options.get(name) for name in names))

    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(UsageError, match="no such file"):
        case(log=tmp_path / "nowhere.log")
    with pytest.raises(UsageError, match="not a shell command"):
        case(launch="vllm serve 'x")
    with pytest.raises(UsageError, match="no tau"):
        case(measured=tmp_path / "other.json")
    found = examine(case(launch="sglang --speculative-algorithm EAGLE3 --chat-template-kwargs {x"))
    assert any("no JSON object" in line for cause in found["causes"] for line in cause["evidence"])


def test_too_small_a_vocabulary_is_named(tmp_path, tiny_target):
    folder = run(tmp_path, tiny_target, vocab={"size": 60})
    found = examine(case_from(folder, None, None, None, None, None, None))
    assert found["causes"][0]["cause"] == "accuracy counted inside the draft vocabulary", found


def test_the_command_prints_the_contract(trained):
    command = [sys.executable, "-m", "eyas", "doctor", "--run", str(trained), "--engine", "sglang", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and set(found) == {"causes", "checked"} and found["checked"]


def test_wrong_use_is_one_sentence(tmp_path):
    command = [sys.executable, "-m", "eyas", "doctor", "--run", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "recipe.yaml" in done.stderr and "Traceback" not in done.stderr

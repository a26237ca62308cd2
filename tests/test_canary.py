"""The canary: its text and states are what the closed form says, and a slow engine with one broken wire is found out."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_parts import to_bits
from engine_parts import serve

from eyas.draft.config import DraftConfig
from eyas.errors import EyasError, UsageError
from eyas.features.store import Sample, teacher_positions
from eyas.serving import canary as c
from eyas.serving.check import check
from eyas.serving.export import load_draft
from eyas.target import read_target

K, NEW = 3, 188  # four times round the cycle: all phases of a walk in steps of four


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    out = tmp_path_factory.mktemp("canary")
    said = c.write(out, "vllm")
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(out / "target", dtype="float32").eval()
    start = torch.tensor([said["prompt"]])
    text = model.generate(start, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    with torch.no_grad():
        states = model(text[None], output_hidden_states=True).hidden_states
    return out, said, text, torch.stack([h[0] for h in states[1:]], 1)  # states [T, LAYERS, WIDTH]: out(v) under v


def test_the_text_is_the_cycle_and_the_states_are_the_closed_form(pair):
    _, said, text, states = pair
    assert text.tolist() == [said["text"][i % c.CYCLE] for i in range(len(text))]
    canary = c.make([1, 5, 8])
    for layer in range(c.LAYERS - 1):
        formula = np.stack([c.stream(canary, token, layer) for token in text.tolist()])
        np.testing.assert_allclose(states[:, layer].numpy(), formula, atol=1e-3)


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llamacpp", "openvino"])
def test_the_draft_is_one_that_the_engine_takes(tmp_path, engine):
    said = c.write(tmp_path, engine)
    verdict = check(tmp_path / "draft", tmp_path / "target", [engine])["verdicts"][engine]
    assert verdict["verdict"] == "pass" and said["layers"] == ([2, 6, 9] if engine == "openvino" else [1, 5, 8])
    assert json.loads((tmp_path / "canary.json").read_text()) == said


def served(pair, weights=None, layers=(1, 5, 8), late=0, token=None, **flags):
    """Acceptance per position of the slow engine on the target's real states, one wire changed in the engine's way."""
    out, said, text, states = pair
    config, state = load_draft(out / "draft", read_target(out / "target"))
    config = DraftConfig.from_dict(config.to_dict() | flags)
    if weights:
        weights(state)
    if token:  # the draft reads another position's token
        cycle = torch.tensor(said["text"])
        state["embed_tokens.weight"][cycle] = state["embed_tokens.weight"][cycle.roll(token)]
    supervised = np.arange(len(text)) > 3
    count = len(teacher_positions(supervised))
    aux = to_bits(states[:, list(layers)].roll(late, 0))
    sample = Sample("0", text.numpy().astype(np.int32), supervised, aux, np.zeros((count, c.WIDTH), np.uint16), np.zeros(count, np.int32))  # fmt: skip
    kept = np.array([accepted for _, accepted in serve(state, config, sample, K)])
    return [float((kept > i).mean()) for i in range(K)]


def blank(name, value=0.0):
    return lambda state: state[name].fill_(value)


def noise(name, scale=0.02, seed=9):
    return lambda state: state[name].copy_(
        torch.randn(state[name].shape, generator=torch.Generator().manual_seed(seed)) * scale
    )


L = "layers.0."
BROKEN = {
    "right": ("right", {}),
    "another first layer": ("layers", {"layers": (3, 5, 8)}),
    "one later": ("layers", {"layers": (2, 6, 9)}),
    "one earlier": ("layers", {"layers": (0, 4, 7)}),
    "descending": ("order", {"layers": (8, 5, 1)}),
    "rotated": ("order", {"layers": (8, 1, 5)}),
    "fc zero": ("fc", {"weights": blank("fc.weight")}),
    "fc random": ("fc", {"weights": noise("fc.weight", 0.0126)}),
    "states late": ("shift", {"late": 1}),
    "token of its own position": ("shift", {"token": 1}),
    "no map": ("map", {"weights": blank("d2t")}),
    "random head": ("head", {"weights": noise("lm_head.weight")}),
    "own embedding": ("embedding", {"weights": noise("embed_tokens.weight")}),
    "no layer": ("layer", {"weights": lambda s: [s[n].zero_() for n in s if "_proj" in n]}),
    "no hidden_norm": ("norms", {"weights": blank(f"{L}hidden_norm.weight", 1)}),
    "no input_layernorm": ("norms", {"weights": blank(f"{L}input_layernorm.weight", 1)}),
    "norm_before_residual": ("norms", {"norm_before_residual": True}),
    "norm_output": ("norms", {"norm_output": True}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_slow_engine_with_a_broken_wire_is_found_out(pair, name):
    wire, change = BROKEN[name]
    found, distance = c.diagnose(served(pair, **change), [1, 5, 8])
    assert (found.name, distance < 0.1) == (wire, True), (found, distance)


@pytest.mark.parametrize("wire", [c.WIRES[0], c.WIRES[4], c.WIRES[11], c.WIRES[-2]], ids=lambda w: w.says[:30])
def test_the_figure_of_a_wire_is_the_slow_engines_exactly(pair, wire):
    canary = c.make([1, 5, 8])
    layers = [canary.layers[b] + wire.layer for b in wire.blocks]
    found = served(pair, wire.tensors, layers, wire.late, **wire.flags)
    assert c.expected(canary, wire, K, NEW + 4) == pytest.approx(found, abs=1e-9)


@pytest.mark.parametrize("layers", [(1, 5, 8), (2, 6, 9)])
def test_the_figures_of_all_wires_lie_apart(layers):
    for k in (3, 5):
        found = c.figures(layers, k)
        assert found[0][1] == [1.0] * k  # the right pair accepts everything
        for (one, a), (two, b) in itertools.combinations(found, 2):
            assert one.name == two.name or max(abs(x - y) for x, y in zip(a, b, strict=True)) > 0.02, (one, two)


def test_a_class_of_target_that_cannot_hold_a_canary_is_told(tmp_path):
    from transformers import Gemma2Config

    with pytest.raises(EyasError, match="Gemma2ForCausalLM: no canary for this class yet"):
        c.write(tmp_path, "vllm", Gemma2Config(architectures=["Gemma2ForCausalLM"]).to_dict())
    with pytest.raises(UsageError, match="expected one of sglang"):
        c.write(tmp_path, "tgi")


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe", "DeepseekV3", "Mistral"])
def test_the_class_of_a_users_target(tmp_path, name):
    """The target takes the class of the config, at the canary's sizes; what is written proves itself in Transformers."""
    import transformers

    config = getattr(transformers, f"{name}Config")(architectures=[f"{name}ForCausalLM"], rope_theta=1e6)
    c.write(tmp_path, "vllm", config.to_dict(), "bfloat16")
    target = read_target(tmp_path / "target")
    assert target.architecture == f"{name}ForCausalLM" and target.num_layers == c.LAYERS
    assert check(tmp_path / "draft", target, ["vllm"])["verdicts"]["vllm"]["verdict"] == "pass"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    canary = c.make([1, 5, 8])
    tokens = torch.tensor([canary.cycle])
    assert model.dtype == torch.bfloat16 and torch.equal(model(tokens).logits[0].argmax(-1), tokens[0].roll(-1))


def test_the_command(tmp_path, capsys):
    from eyas.cli import app

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            app([*map(str, arguments), "--json"])
        return end.value.code, json.loads(capsys.readouterr().out)

    code, said = run("canary", tmp_path, "--engine", "llamacpp")
    assert code == 0 and said["layers"] == [1, 5, 8] and replace is not None
    later = next(w for w in c.WIRES if w.layer == 1)
    rates = ",".join(map(str, c.expected(c.make([1, 5, 8]), later, 4)))
    code, said = run("canary", tmp_path, "--engine", "llamacpp", "--measured", rates)
    assert code == 1 and said["wire"] == "layers" and "one later" in said["says"]
    code, said = run("canary", tmp_path, "--engine", "llamacpp", "--measured", "1 1 1")
    assert code == 0 and said["wire"] == "right"


SERVER = """
import http.server, os, pathlib, subprocess, sys, time
note, model, port = pathlib.Path(sys.argv[1]), sys.argv[-3], int(sys.argv[-1])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(note / "started").write_text(f"{os.getpid()} {worker.pid}")

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health":
            (note / "asked").touch()
            time.sleep(600)
        self.send_response(200)
        self.end_headers()

if sys.argv[2] == "answers":
    http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
time.sleep(600)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("mode", "moment"), [("loads", "started"), ("answers", "asked")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_to_the_command_stops_its_server(tmp_path, mode, moment, number):
    """While the server is loading and while it is being asked: it and its worker are gone when the command is."""
    said = {"engine": "vllm", "serve": "vllm serve some-model", "layers": [1, 5, 8], "prompt": [3, 4, 5, 6]}
    (tmp_path / "canary.json").write_text(json.dumps(said))
    (tmp_path / "server.py").write_text(SERVER)
    program = f"{sys.executable} {tmp_path / 'server.py'} {tmp_path} {mode}"
    command = [sys.executable, "-m", "eyas", "canary", str(tmp_path), "--engine", "vllm", "--run", program]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / moment).exists() and running.poll() is None:
            time.sleep(0.05)
        time.sleep(0.05)  # the note's few bytes are written
        pids = [int(pid) for pid in (tmp_path / "started").read_text().split()]
        assert running.poll() is None and len(pids) == 2 and all(map(alive, pids))
        running.send_signal(number)
        assert running.wait(60) == 128 + number
        for _ in range(1200):  # the worker is told at the same time, and nobody waits for it
            if any(map(alive, pids)):
                time.sleep(0.05)
        assert not any(map(alive, pids))
    finally:
        running.kill()
        for pid in (tmp_path / "started").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

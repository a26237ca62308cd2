"""Extraction from engines over HTTP: the real vLLM on a CPU where its environment is there, SGLang's answers imitated."""

import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save_tiny_target
from engines.vllm import PYTHON
from test_extract import LAYERS, make_documents
from test_servers import free_port

from eyas.errors import EyasError, UsageError
from eyas.features import engines
from eyas.features.codec import to_float
from eyas.features.extract import compare, extract
from eyas.features.store import Store
from eyas.target import LoadedTarget, load_target, read_target


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> LoadedTarget:
    return load_target(tiny_target)


def test_ends_are_the_targets_own(target: LoadedTarget, tiny_target: Path) -> None:
    ends = engines.ends(read_target(tiny_target))
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ends.logits(ends.body.norm(states)), target.logits(target.body.norm(states)))
    assert ends.body.layers[0].mlp.up_proj.weight.device.type == "meta"


@pytest.fixture
def sglang(target: LoadedTarget) -> Iterator[dict[str, str]]:
    """No SGLang: a server whose answers have the form of its documentation, with the states of our target."""

    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/generate" and body["return_hidden_states"]
            with lock, torch.inference_mode(), target.capturing(LAYERS) as caught:
                target.body(input_ids=torch.tensor([body["input_ids"]]), use_cache=False)
            aux = torch.cat([caught[layer][0] for layer in LAYERS], -1)
            states = {"aux": aux, "final": caught["final"][0], "short": aux[3:]}[self.server.kind]  # type: ignore[attr-defined]
            reply = {"text": "x", "output_ids": [5], "meta_info": {"hidden_states": [states.tolist()]}}
            data = json.dumps(reply if self.server.kind != "none" else {"text": "x", "meta_info": {}}).encode()  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

    urls = {}
    servers = []
    for kind in ("aux", "final", "short"):
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        servers[-1].kind = kind  # type: ignore[attr-defined]
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        urls[kind] = f"http://127.0.0.1:{servers[-1].server_address[1]}"
    yield urls
    for server in servers:
        server.shutdown()


def near(path: Path, other: Path) -> None:
    """The same samples; states within the noise of another batch shape and bf16."""
    one, two = Store(path), Store(other)
    assert one.ids == two.ids
    for name in one.ids:
        a, b = one.read(name), two.read(name)
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.supervised, b.supervised)
        for x, y in ((a.aux, b.aux), (a.final, b.final)):
            np.testing.assert_allclose(to_float(x), to_float(y), rtol=0.02, atol=0.02)
        assert np.mean(a.argmax == b.argmax) > 0.95


def test_sglang_gives_what_a_forward_pass_gives(
    target: LoadedTarget, sglang: dict[str, str], tiny_target: Path, tmp_path: Path
) -> None:
    documents = make_documents(10, 300)
    options = {"layers": LAYERS, "token_budget": 400, "threshold": 0}
    extract(documents, target, tmp_path / "here", **options)
    ends = engines.ends(read_target(tiny_target))
    source = engines.sglang(sglang["aux"], sglang["final"], ends)
    figures = extract(documents, ends, tmp_path / "there", source=source, **options)
    assert figures["samples"] == 10 and figures["complete"]
    near(tmp_path / "there", tmp_path / "here")
    for pair, words in (
        (("final", "aux"), "must give auxiliary states"),
        (("short", "final"), "prefix cache"),
    ):
        broken = engines.sglang(*(sglang[name] for name in pair), ends)
        with pytest.raises((UsageError, EyasError), match=words):
            extract(documents, ends, tmp_path / "broken", source=broken, **options)
    with pytest.raises(EyasError, match="no answer"):
        list(engines.sglang("http://127.0.0.1:9", sglang["final"], ends)(documents[:1]))


@pytest.mark.engines
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: run `python tools/engines.py vllm`")
@pytest.mark.skipif("EYAS_ENGINES" not in os.environ, reason="takes a minute: make test-engines")
def test_the_real_vllm_gives_what_a_forward_pass_gives(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "target", hidden=128)  # its CPU attention wants heads of 32
    target, port = load_target(folder), free_port()
    command = engines.vllm_command(str(folder), LAYERS, target.target.num_layers, str(tmp_path / "hs"))
    command[0] = str(PYTHON)
    command += [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
    ]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0", "PYTHONPATH": str(Path(engines.__file__).parents[2]),
    }  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(6000):
            assert server.poll() is None, (tmp_path / "log").read_text(errors="replace")[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.1)
        documents = make_documents(10, 300)
        ends = engines.ends(read_target(folder))
        options = {"layers": LAYERS, "token_budget": 400, "threshold": 0}
        extract(documents, ends, tmp_path / "there", source=engines.vllm(url, ends), **options)
    finally:
        server.terminate()
        server.wait(300)
    extract(documents, target, tmp_path / "here", **options)
    near(tmp_path / "there", tmp_path / "here")
    assert compare(tmp_path / "there", target)["ok"] == 8 and not list((tmp_path / "hs").iterdir())

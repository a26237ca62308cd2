"""Generation over HTTP from real server processes: the same documents as in process, whatever the servers do."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.data import servers as servers_module
from eyas.data.generate import generate
from eyas.data.servers import generate_from_servers
from eyas.data.template import ChatTemplate
from eyas.errors import EyasError, UsageError
from eyas.target import load_target

QUESTIONS = ("What is {} plus {}?", "Name {} animals in {} words.", "Write {} lines, then {} more.")
TALKS = [
    {
        "id": f"talk-{i}",
        "category": "",
        "system": None,
        "turns": [QUESTIONS[i % 3].format(i, i + 2), "And then?"][: 1 + i % 2],
    }
    for i in range(12)
]
OPTIONS: dict[str, Any] = {"max_new_tokens": 10}


@pytest.fixture(scope="module")
def target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with an end token that it likes, so that some answers end and others are cut off."""
    loaded, folder = load_target(tiny_target), tmp_path_factory.mktemp("target") / "ending"
    loaded.head[loaded.tokenizer.eos_token_id] *= 3
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def serving(folder: Path, *kinds: str, port: int | None = None) -> Iterator[tuple[list[str], subprocess.Popen]]:
    """One process that is a server of each kind ("vllm:fail=5"); yields their addresses and the process."""
    ports = [port or free_port() for _ in kinds]
    specs = [f"{port}:{kind}" for port, kind in zip(ports, kinds, strict=True)]
    command = [sys.executable, str(Path(__file__).with_name("chat_server.py")), str(folder), *specs]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for _ in range(1200):
            assert process.poll() is None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{urls[-1]}/v1/models", timeout=5):
                break
            time.sleep(0.05)
        yield urls, process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


KINDS = ("vllm:fail=5", "sglang:fail=5", "llamacpp:fail=5", "openai", "vllm:hide=1", "sglang:fail=4")


@pytest.fixture(scope="module")
def servers(target: Path) -> Iterator[dict[str, str]]:
    """Addresses of well-meaning servers by kind."""
    with serving(target, *KINDS) as (urls, _):
        yield dict(zip(KINDS, urls, strict=True))


Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def expected(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What generation in process writes, float32."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("expected") / "answers.jsonl"
    generate(TALKS, load_target(target, dtype="float32"), out, slots=4, **OPTIONS)
    finish = [reason for document in read(out) for reason in document["finish"]]
    assert len(finish) == sum(len(talk["turns"]) for talk in TALKS) and set(finish) == {"stop", "length"}
    return out


@pytest.fixture
def ask(target: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setattr(servers_module, "RETRY_FIRST", 0.02)
    monkeypatch.setattr(servers_module, "RETRY_MOST", 0.2)
    loaded = load_target(target)
    template = ChatTemplate(loaded.tokenizer)

    def ask(urls: list[str], out: Path, **options: Any) -> dict[str, Any]:
        return generate_from_servers(TALKS, loaded.target, template, urls, out, **(OPTIONS | options))

    return ask


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_token_ids_are_those_in_process(
    kind: str, servers: dict[str, str], expected: Path, tmp_path: Path, ask: Ask
) -> None:
    figures = ask([servers[f"{kind}:fail=5"]], tmp_path / "answers.jsonl", concurrency=4)
    assert (tmp_path / "answers.jsonl").read_bytes() == expected.read_bytes()
    assert figures["engine"] == kind and figures["from_text"] == 0
    (server,) = figures["servers"]
    assert server["answers"] == figures["turns"] and server["failures"] >= server["answers"] // 5
    assert server["requests"] == server["answers"] + server["failures"]


def test_text_is_tokenised_once_and_marked(
    servers: dict[str, str], target: Path, expected: Path, tmp_path: Path, ask: Ask
) -> None:
    figures = ask([servers["openai"]], tmp_path / "answers.jsonl")
    documents = read(tmp_path / "answers.jsonl")
    assert figures["engine"] == "openai" and figures["from_text"] == len(documents) == len(TALKS)
    template = ChatTemplate(load_target(target).tokenizer)
    for document, known in zip(documents, read(expected), strict=True):
        assert document["ids_from"] == "text"
        start, end = known["spans"][0]
        assert document["tokens"][:start] == known["tokens"][:start]
        text = template.tokenizer.decode(known["tokens"][start:end], skip_special_tokens=True)
        (start, end), ids = document["spans"][0], template.encode(text)[: OPTIONS["max_new_tokens"]]
        if document["finish"][0] == "stop":
            assert document["tokens"][end - 1] in template.end_ids
            end -= 1
        assert document["tokens"][start:end] == ids[: end - start]


def test_an_end_token_that_a_server_keeps_to_itself_is_put_back(
    servers: dict[str, str], expected: Path, tmp_path: Path, ask: Ask
) -> None:
    ask([servers["vllm:hide=1"]], tmp_path / "answers.jsonl")
    assert (tmp_path / "answers.jsonl").read_bytes() == expected.read_bytes()


def test_a_server_that_dies_leaves_its_work_to_the_other(
    servers: dict[str, str], target: Path, expected: Path, tmp_path: Path, ask: Ask
) -> None:
    with serving(target, "vllm:die=3") as ((mortal,), process):
        figures = ask([mortal, servers["sglang:fail=4"] + "/"], tmp_path / "answers.jsonl", concurrency=3)
        assert process.wait(10) == 9
    assert (tmp_path / "answers.jsonl").read_bytes() == expected.read_bytes()
    assert figures["servers"][0]["answers"] <= 3 and figures["servers"][0]["failures"] > 0
    assert sum(server["answers"] for server in figures["servers"]) == figures["turns"]


def test_all_dead_is_one_sentence_and_the_next_run_goes_on(
    target: Path, expected: Path, tmp_path: Path, ask: Ask
) -> None:
    out, port = tmp_path / "answers.jsonl", free_port()
    said = r"no server has answered for 1 s\. (\d+) finished documents are kept"
    with (
        serving(target, "llamacpp:die=6", port=port) as (urls, _),
        pytest.raises(EyasError, match=said) as error,
    ):
        ask(urls, out, concurrency=2, patience=1.0)
    kept = (tmp_path / "answers.jsonl.part").read_bytes().count(b"\n")
    assert not out.exists() and f" {kept} finished" in str(error.value) and 0 < kept < len(TALKS)
    with serving(target, "llamacpp", port=port) as (urls, _):
        figures = ask(urls, out)
    assert figures["resumed"] == kept
    assert out.read_bytes() == expected.read_bytes()


def test_a_wrong_server_is_one_sentence(servers: dict[str, str], tmp_path: Path, ask: Ask) -> None:
    out = tmp_path / "answers.jsonl"
    with pytest.raises(UsageError, match=r"/completion: refused conversation 'talk-\d+' with 404 .*llamacpp server"):
        ask([servers["openai"]], out, kind="llamacpp")
    with pytest.raises(UsageError, match="Expected at least one server"):
        ask([], out)
    with pytest.raises(EyasError, match="no server has answered for 0 s"):
        ask([f"http://127.0.0.1:{free_port()}"], out, patience=0.2)
    assert not out.exists()

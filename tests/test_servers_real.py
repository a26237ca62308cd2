"""A real llama-server answers multi-turn conversations over HTTP; it and the client are killed with SIGKILL on the way.

The result must be what greedy generation in this process gives, token for token, in float32. (In bfloat16 it is not: the
two add in another order, and where two logits are nearly equal the other one wins.)
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import llamacpp
from test_servers import free_port, read

from eyas.data.generate import generate
from eyas.target import load_target

ROOT = Path(__file__).parents[1]
COUNT = 60 if os.environ.get("EYAS_ENGINES") else 10
OPTIONS = {"max_new_tokens": 12, "max_length": 1024}
CLIENT = """
import json, sys
from eyas.data.servers import generate_from_servers
from eyas.data.template import ChatTemplate
from eyas.target import load_tokenizer, read_target
target, url, talks, out, options = sys.argv[1:]
target = read_target(target)
template = ChatTemplate(load_tokenizer(target))
print(json.dumps(generate_from_servers(json.load(open(talks)), target, template, [url], out, concurrency=2, **json.loads(options))))
"""
pytestmark = [
    pytest.mark.engines,
    pytest.mark.target,
    pytest.mark.skipif(llamacpp.server() is None, reason="no .venv-llamacpp: run `python tools/engines.py llamacpp`"),
]


def talks(count: int) -> list[dict]:
    """Conversations of two or three short turns, out of the demo's prompts."""
    rows = [json.loads(line) for line in (ROOT / "examples" / "prompts.jsonl").read_text("utf-8").splitlines()]
    turns = [row["turns"][0] for row in rows if len(row["turns"][0]) < 120]
    more = ["Say it in other words.", "Give an example.", "And why is that?"]
    return [
        {"id": f"talk-{i}", "category": "", "system": None, "turns": [turns[i * 7], *more[i % 3 :][: 1 + i % 2]]}
        for i in range(count)
    ]


def start_server(gguf: Path, port: int) -> subprocess.Popen:
    command = [llamacpp.server(), "-m", gguf, "-c", 1024, "-np", 1, "-t", 2, "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    command += ["--host", "127.0.0.1", "--port", port, "--no-warmup"]
    with open(gguf.with_suffix(".server.log"), "ab") as log:
        return subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)


def test_sixty_conversations_through_a_server_and_a_client_that_are_killed(smollm2: Path, tmp_path: Path) -> None:
    conversations, out, port = talks(COUNT), tmp_path / "answers.jsonl", free_port()
    (tmp_path / "talks.json").write_text(json.dumps(conversations))
    with llamacpp.Converter() as convert:
        assert convert(smollm2, tmp_path / "target.gguf") == ""
    arguments = [smollm2, f"http://127.0.0.1:{port}", tmp_path / "talks.json", out, json.dumps(OPTIONS)]

    def start_client() -> subprocess.Popen:
        command = [sys.executable, "-c", CLIENT, *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def wait_for(finished: int, *alive: subprocess.Popen) -> int:
        part = out.with_name(out.name + ".part")
        for _ in range(6000):
            lines = part.read_bytes().count(b"\n") if part.exists() else 0
            if lines >= finished:
                return lines
            assert all(process.poll() is None for process in alive)
            time.sleep(0.05)
        raise AssertionError(f"{lines} of {finished}")

    server, client = start_server(tmp_path / "target.gguf", port), start_client()
    try:
        before = wait_for(COUNT // 5, server, client)
        server.kill()
        server.wait()
        time.sleep(1)  # the client meets a closed door
        server = start_server(tmp_path / "target.gguf", port)
        between = wait_for(COUNT // 2, server, client)
        client.kill()
        client.wait()
        assert not out.exists() and before <= between < COUNT
        client = start_client()
        figures = json.loads(client.communicate(timeout=500)[0])
    finally:
        for process in (server, client):
            process.kill()
            process.wait()
    assert figures["resumed"] >= between and figures["engine"] == "llamacpp" and figures["documents"] == COUNT
    generate(conversations, load_target(smollm2, dtype="float32"), tmp_path / "here.jsonl", slots=12, **OPTIONS)
    assert read(out) == read(tmp_path / "here.jsonl")
    said = {name: figures[name] for name in ("documents", "turns", "generated_tokens", "finish", "resumed")}
    print(
        f"killed the server at {before} and the client at {between} documents; {json.dumps(said)}: equal, token for token"
    )

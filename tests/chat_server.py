"""A small server process that answers like vLLM, SGLang, llama-server or a text-only server, with a real target.

python chat_server.py TARGET PORT KIND [--fail-every N] [--die-after N] [--hide-end]
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from eyas.data.template import ChatTemplate
from eyas.target import LoadedTarget, load_target

SIGNS = {"vllm": "/version", "sglang": "/get_model_info", "llamacpp": "/props", "openai": None}


def main() -> None:
    torch.set_num_threads(1)
    target = load_target(sys.argv[1], dtype="float32")
    template, lock = ChatTemplate(target.tokenizer), threading.Lock()
    servers = [make_server(target, template, lock, *spec.split(":")) for spec in sys.argv[2:]]
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()


def make_server(
    target: LoadedTarget, template: ChatTemplate, lock: threading.Lock, port: str, kind: str, *extras: str
) -> ThreadingHTTPServer:
    options = {name: int(value) for name, value in (extra.split("=") for extra in extras)}
    count = 0

    def complete(prompt: list[int], room: int) -> tuple[list[int], bool]:
        ids = torch.tensor([prompt])
        written = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=room,
            eos_token_id=sorted(template.end_ids),
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        stopped = written[-1] in template.end_ids
        return (written[:-1] if stopped and "hide" in options else written), stopped

    def answer(path: str, body: dict) -> dict | None:
        if (kind, path) == ("vllm", "/v1/completions"):
            assert body["model"] == "tiny" and body["return_token_ids"]
            ids, stopped = complete(body["prompt"], body["max_tokens"])
            return {"choices": [{"token_ids": ids, "finish_reason": "stop" if stopped else "length"}]}
        if (kind, path) == ("sglang", "/generate"):
            ids, stopped = complete(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            return {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop" if stopped else "length"}}}
        if (kind, path) == ("llamacpp", "/completion"):
            ids, stopped = complete(body["prompt"], body["n_predict"])
            return {"tokens": ids, "stop_type": "eos" if stopped else "limit"}
        if (kind, path) == ("openai", "/v1/chat/completions"):
            ids, stopped = complete(template.prompt_ids(body["messages"]), body["max_tokens"])
            text = target.tokenizer.decode(ids, skip_special_tokens=True)
            return {"choices": [{"message": {"content": text}, "finish_reason": "stop" if stopped else "length"}]}
        return None

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def send(self, status: int, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == SIGNS[kind]:
                self.send(200, {"is": kind})
            elif self.path == "/v1/models":
                self.send(200, {"data": [{"id": "tiny"}]})
            else:
                self.send(404, {})

        def do_POST(self) -> None:
            nonlocal count
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                count += 1
                if count > options.get("die", count):
                    os._exit(9)
                if "fail" in options and count % options["fail"] == 0:
                    return self.send(503, {"error": "busy"})
                value = answer(self.path, body)
            return self.send(200, value) if value is not None else self.send(404, {"error": "no such path"})

    return ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)


if __name__ == "__main__":
    main()

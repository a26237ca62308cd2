"""Imitations of vLLM, SGLang and llama-server for the tests of `eyas measure`: no engine, but their documented formats.

What they say is true: a real target and a real draft decode (eyas' own decoder), and each imitation reports those
rounds where and how its engine does. Options make them misbehave as real servers can.
"""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from decode_parts import Pair

from eyas.decode.chain import Answer, Chain, Decoder

SIGNS = {"vllm": "/version", "sglang": "/get_model_info", "llamacpp": "/props"}


@dataclass
class Imitation:
    """One server. draft None: without speculation. warm: share of each prompt said to come from a cache."""

    kind: str
    pair: Pair
    folder: Path
    draft: Any = None
    k: int = 3
    warm: float = 0.0
    ignore_eos: bool = False
    others: int = 0  # tokens that other clients get meanwhile, per request
    silent: bool = False  # counters switched off
    dies: bool = False  # hangs up when asked for its counters
    status: int = 200
    answers: list[Answer] = field(default_factory=list)
    counters: Counter = field(default_factory=Counter)
    lock: Any = field(default_factory=threading.Lock)

    def write(self, prompt: list[int], room: int) -> Answer:
        ends = frozenset() if self.ignore_eos else frozenset(self.pair.template.end_ids)
        answer = Decoder(self.pair.loaded, self.draft, Chain(self.k)).answer(list(prompt), room, ends)
        self.answers.append(answer)
        c = self.counters
        c["vllm:generation_tokens_total"] += len(answer.tokens) + self.others
        c["vllm:prompt_tokens_total"] += len(prompt)
        c["vllm:prefix_cache_queries_total"] += len(prompt)
        c["vllm:prefix_cache_hits_total"] += int(self.warm * len(prompt))
        if self.draft is not None:
            c["vllm:spec_decode_num_drafts_total"] += len(answer.accepted)
            c["vllm:spec_decode_num_draft_tokens_total"] += answer.drafted
            c["vllm:spec_decode_num_accepted_tokens_total"] += sum(answer.accepted)
            for i in range(self.k):
                kept = sum(accepted > i for accepted in answer.accepted)
                c[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] += kept
        return answer

    def metrics(self) -> str:
        """Two engines share the counts, so that they must be added up; a gauge and comments stand among them."""
        lines = ["# HELP vllm:num_requests_running x", "# TYPE vllm:num_requests_running gauge"]
        lines.append('vllm:num_requests_running{engine="0",model_name="tiny"} 0.0')
        for name, count in self.counters.items():
            base, _, label = name.partition("{")
            extra = "," + label.rstrip("}") if label else ""
            for engine, share in ((0, count // 3), (1, count - count // 3)):
                lines.append(f'{base}{{engine="{engine}",model_name="tiny"{extra}}} {float(share)}')
        return "\n".join(lines) + "\n"

    def get(self, path: str) -> Any:
        if path == SIGNS[self.kind]:
            return {"model_path": str(self.folder) if self.kind == "sglang" else "tiny.gguf", "version": "imitation"}
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "root": str(self.folder)}]}
        if path == "/server_info" and self.kind == "sglang":
            draft = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": self.k, "speculative_eagle_topk": 1}
            draft |= {"speculative_num_draft_tokens": self.k + 1, "speculative_draft_model_path": None}
            return {"model_path": str(self.folder), "internal_states": [{"avg_spec_accept_length": 1.0}]} | (
                draft if self.draft is not None else dict.fromkeys(draft)
            )
        return None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if (self.kind, path) == ("vllm", "/v1/completions"):
            assert body["model"] == "tiny" and "ignore_eos" not in body
            answer = self.write(body["prompt"], body["max_tokens"])
            return {"choices": [{"token_ids": answer.tokens, "finish_reason": self.finish(answer)}]}
        if (self.kind, path) == ("sglang", "/generate"):
            answer = self.write(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            meta = {"finish_reason": {"type": self.finish(answer)}, "completion_tokens": len(answer.tokens)}
            meta["cached_tokens"] = int(self.warm * len(body["input_ids"]))
            if self.draft is not None and not self.silent:
                meta |= {"spec_verify_ct": len(answer.accepted), "spec_num_correct_drafts": sum(answer.accepted)}
                meta["spec_num_proposed_drafts"] = answer.drafted
                meta["spec_correct_drafts_histogram"] = [answer.accepted.count(i) for i in range(self.k + 1)]
            return {"output_ids": answer.tokens, "meta_info": meta}
        if (self.kind, path) == ("llamacpp", "/completion"):
            assert body["cache_prompt"] is False
            answer = self.write(body["prompt"], body["n_predict"])
            timings = {"predicted_n": len(answer.tokens), "prompt_n": len(body["prompt"]), "cache_n": 0}
            if self.draft is not None and not self.silent:
                timings |= {"draft_n": answer.drafted, "draft_n_accepted": sum(answer.accepted)}
            return {
                "tokens": answer.tokens,
                "stop_type": "eos" if self.finish(answer) == "stop" else "limit",
                "timings": timings,
            }
        return None

    def finish(self, answer: Answer) -> str:
        return "stop" if answer.tokens[-1] in self.pair.template.end_ids else "length"


@contextmanager
def serving(imitation: Imitation):
    """Yields the address of the imitation, served from a thread of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def send(self, status: int, value: Any) -> None:
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/metrics" and imitation.dies:
                self.close_connection = True
                return None
            if self.path == "/metrics" and imitation.kind == "vllm" and not imitation.silent:
                return self.send(200, imitation.metrics())
            value = imitation.get(self.path)
            return self.send(200, value) if value is not None else self.send(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if imitation.status != 200:
                return self.send(imitation.status, {"error": "busy"})
            with imitation.lock:
                value = imitation.post(self.path, body)
            return self.send(200, value) if value is not None else self.send(404, {})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()

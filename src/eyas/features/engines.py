"""States from an engine that runs already, over HTTP, in place of a forward pass here. Each source takes documents and
gives their states in order, for `extract(..., source=...)`.

vLLM     `extract_hidden_states` writes a file a request, through the connector in eyas.features.vllm_connector; its last
         state is taken before the final norm, which is applied here. Launch it as `vllm_command` says.
SGLang   two servers (or one after the other): with --enable-return-aux-hidden-states it gives the auxiliary states,
         with --enable-return-hidden-states the final ones, after the norm; one run cannot give both.

The target's own norm and head are needed for the teacher's argmax: `ends` loads these alone.
"""

import fcntl
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers as tf

from eyas.errors import EyasError, UsageError
from eyas.features.extract import Source, State, argmax
from eyas.features.foreign import read
from eyas.features.record import Damaged, mask_of, teacher_positions
from eyas.target import LoadedTarget, Target

AT_ONCE = 8  # requests in flight


def ends(target: Target, dtype: str = "auto") -> LoadedTarget:
    """A target whose final norm and head are loaded, and nothing else: its layers stay on the meta device."""
    config = tf.AutoConfig.from_pretrained(target.path, local_files_only=True)
    kind: Any = tf.AutoModelForCausalLM if target.text is target.config else tf.AutoModelForImageTextToText
    stored = target.read_tensor(str(target.tensor_name("norm"))).dtype
    with torch.device("meta"):
        model = kind.from_config(config, dtype=stored if dtype == "auto" else getattr(torch, dtype))
    loaded = LoadedTarget(target, model.eval().requires_grad_(False), None)
    head = model.get_output_embeddings()
    for module, part in ((loaded.body.norm, "norm"), (head, "head")):
        values = target.read_tensor(str(target.tensor_name(part)))
        module.weight = torch.nn.Parameter(values.to(loaded.dtype), requires_grad=False)
    return loaded


def vllm_command(target: str, layers: list[int], count: int, folder: str) -> list[str]:
    """The launch line of a vLLM server for `vllm`; `count` is the target's number of layers."""
    ids = [layer + 1 for layer in layers] + [count]  # vLLM counts streams: k is what leaves k layers
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "eyas.features.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--no-enable-prefix-caching"] + [
        part
        for name, value in (("--speculative-config", speculative), ("--kv-transfer-config", transfer))
        for part in (name, json.dumps(value))
    ]


def open_source(urls: list[str], target: LoadedTarget) -> Source:
    return vllm(urls[0], target) if len(urls) == 1 else sglang(urls[0], urls[1], target)


def vllm(url: str, target: LoadedTarget) -> Source:
    """Through a server on this machine (its files are read, then removed)."""
    model = _post(url, "/v1/models")["data"][0]["id"]

    def one(document: dict[str, Any]) -> State:
        body = {"model": model, "prompt": document["tokens"], "max_tokens": 1, "temperature": 0}
        answer = _post(url, "/v1/completions", body)
        file = Path(_field(url, answer, "kv_transfer_params", "hidden_states_path"))
        lock = file.with_name(file.name + ".lock")
        with open(lock) as handle:
            fcntl.flock(handle, fcntl.LOCK_SH)  # until it is written
        try:
            row = read(file)
        except Damaged as damage:
            raise EyasError(f"{url}: {file} of document {document['id']!r}: {damage}.") from None
        file.unlink()
        lock.unlink()
        if row.tokens.tolist() != document["tokens"]:
            raise EyasError(f"{url}: the states of document {document['id']!r} came with other tokens.")
        at = teacher_positions(mask_of(document["spans"], len(row.tokens)))
        final = target.body.norm(_tensor(row.states[at, -1]).to(target.head))
        return _tensor(row.states[:, :-1]), final.to("cpu", torch.bfloat16), argmax(target, final)

    return _in_order(one)


def sglang(aux_url: str, final_url: str, target: LoadedTarget) -> Source:
    """Through two servers of the same target, of which one gives the auxiliary and one the final states."""

    def ask(url: str, document: dict[str, Any]) -> "torch.Tensor":
        sampling = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": document["tokens"], "sampling_params": sampling, "return_hidden_states": True}
        states = torch.tensor(_field(url, _post(url, "/generate", body), "meta_info", "hidden_states")[0])
        if len(states) != len(document["tokens"]):
            raise EyasError(
                f"{url}: {len(states)} states for the {len(document['tokens'])} tokens of document {document['id']!r}. "
                "A prefix cache cuts them short: launch with --disable-radix-cache."
            )
        return states

    def one(document: dict[str, Any]) -> State:
        width = target.target.hidden_size
        aux, final = ask(aux_url, document), ask(final_url, document)
        if aux.shape[1] % width or aux.shape[1] == width or final.shape[1] != width:
            raise UsageError(
                f"{aux_url}, {final_url}: states of width {aux.shape[1]} and {final.shape[1]}, expected several times "
                f"{width} and {width}. The first server must give auxiliary states, the second the final ones."
            )
        at = teacher_positions(mask_of(document["spans"], len(final)))
        final = final[at].to(target.head)
        aux = aux.reshape(len(aux), -1, width).to(torch.bfloat16)
        return aux, final.to("cpu", torch.bfloat16), argmax(target, final)

    return _in_order(one)


def _tensor(bits: np.ndarray) -> "torch.Tensor":
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def _in_order(one: Any) -> Source:
    def source(documents: list[dict[str, Any]]) -> Iterator[State]:
        def work(document: dict[str, Any]) -> State:
            with torch.inference_mode():
                return one(document)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            yield from pool.map(work, documents)

    return source


def _post(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        answer = httpx.request("POST" if body else "GET", url + path, json=body, timeout=600)
        value = answer.json() if answer.status_code == 200 else None
    except (httpx.TransportError, ValueError) as error:
        raise EyasError(f"{url}{path}: no answer ({error}). Start the server and run the same command again.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{url}{path}: refused with {answer.status_code} ({' '.join(answer.text.split())[:200]}).")
    return value


def _field(url: str, answer: dict[str, Any], outer: str, inner: str) -> Any:
    try:
        return answer[outer][inner]
    except (KeyError, TypeError):
        raise UsageError(f"{url}: its answer has no {outer}.{inner}. Launch it as docs/store.md says.") from None

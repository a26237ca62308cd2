"""SGLang's own config reading, loader, target and draft classes on the CPU, from .venv-sglang, under a loop of ours.

Its kernels are CUDA only, so its scheduler and attention kernels cannot run here: attention is torch's, over all that
was kept; everything that a draft folder can break (classes, names, layers, fc, norms, map, embedding, head) is SGLang's.
"""

from engines.worker import Worker, python

PYTHON = python("sglang")
_WORKER = '''
import builtins, gc, json, os, sys, tempfile, types
reply = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from pathlib import Path
import torch
torch.set_num_threads(1)

class Inert(types.ModuleType):
    """Stands in for CUDA-only packages, for SGLang's own files only: imports work, nothing in it does anything."""
    def __init__(self, name="inert"):
        super().__init__(name)
        self.__path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert(name)
    def __call__(self, *given, **_):
        return given[0] if len(given) == 1 and callable(given[0]) else Inert()
    def __mro_entries__(self, _):
        return ()
    def __getitem__(self, _):
        return Inert()

def imported(name, globals=None, locals=None, fromlist=(), level=0, real=builtins.__import__):
    foreign = level == 0 and name.split(".")[0] in ("sgl_kernel", "torchvision", "triton")
    if foreign and "/sglang/" in (globals or {}).get("__file__", ""):
        return Inert(name)
    return real(name, globals, locals, fromlist, level)

builtins.__import__ = imported
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs
args = ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native", disable_cuda_graph=True)
runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
meeting = f"file://{tempfile.mktemp()}"
init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=meeting, backend="gloo")
initialize_model_parallel()
from safetensors.torch import load_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import configure_aux_hidden_state_capture
from sglang.srt.models.registry import ModelRegistry

CACHE = {}

def attend(self, q, k, v, forward_batch, save_kv_cache=True, **_):
    q, k, v = (x.view(len(q), -1, self.qk_head_dim).transpose(0, 1) for x in (q, k, v))
    if self in CACHE:
        k, v = (torch.cat([old, new], 1) for old, new in zip(CACHE[self], (k, v)))
    CACHE[self] = k, v
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=self.scaling, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(q.shape[1], -1)

RadixAttention.forward = attend

def crop(model, rows):
    for layer in [m for m in model.modules() if m in CACHE]:
        CACHE[layer] = tuple(x[:, :rows] for x in CACHE[layer])

def kept(model):
    return next((CACHE[m][0].shape[1] for m in model.modules() if m in CACHE), 0)

def build(folder, **options):
    config = ModelConfig(model_path=folder, dtype="float32", **options)
    model = ModelRegistry.resolve_model_cls(config.hf_config.architectures)[0](config.hf_config)
    files = sorted(Path(folder).glob("*.safetensors")) or sorted(Path(folder).glob("*.bin"))
    read = lambda f: load_file(f) if f.suffix == ".safetensors" else torch.load(f, weights_only=True)
    model.load_weights((name, tensor) for file in files for name, tensor in sorted(read(file).items()))
    return model, config

def batch(tokens, hidden, first):
    n = len(tokens)
    at = torch.arange(n)
    made = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=tokens, req_pool_indices=torch.zeros(1, dtype=torch.long),
        seq_lens=torch.tensor([first + n]), out_cache_loc=at, seq_lens_sum=first + n, positions=first + at,
        spec_info=types.SimpleNamespace(hidden_states=hidden),
    )
    return made

def target_step(model, tokens):
    """(auxiliary states [n, A*H], greedy next tokens) of tokens that follow what is kept."""
    tokens, first = torch.tensor(tokens), kept(model)
    made = batch(tokens, None, first)
    out = model.model(tokens, made.positions, made)
    hidden, aux = out if isinstance(out, tuple) else (out, [out])
    logits = hidden @ model.lm_head.weight[: model.config.vocab_size].T
    return torch.cat([a for a in aux], -1), logits.argmax(-1).tolist()

def draft_step(model, tokens, hidden):
    tokens, first = torch.tensor(tokens), kept(model)
    made = batch(tokens, hidden, first)
    normed, aux = model.model(tokens, made.positions, made)
    best = int((normed[-1] @ model.lm_head.weight[: model.logits_processor.config.vocab_size].T).argmax())
    return aux[0][-1:], best if model.hot_token_id is None else model.hot_token_id[best].item()

def speculate(target, draft, prompt, new, k):
    """Greedy, chains of k in every round, as SGLang drafts; counts as vLLM's metrics do."""
    CACHE.clear()
    tokens = list(prompt)
    aux, following = target_step(target, tokens)
    tokens.append(following[-1])
    drafted, per_position = 0, [0] * k
    while len(tokens) - len(prompt) < new:
        hidden, guess = draft_step(draft, tokens[1 + kept(draft) :], aux)
        rows, chain = kept(draft), [guess]
        for _ in range(k - 1):
            hidden, guess = draft_step(draft, chain[-1:], hidden)
            chain.append(guess)
        crop(draft, rows)
        size = target.config.vocab_size
        fed = [t if 0 <= t < size else 0 for t in chain]  # an id past the vocabulary: a fault on a GPU, never right here
        aux, truth = target_step(target, [tokens[-1], *fed])
        right = 0
        while right < k and chain[right] == truth[right]:
            per_position[right] += 1
            right += 1
        tokens += [*chain[:right], truth[right]]
        crop(target, len(tokens) - 1)
        aux = aux[: right + 1]
        drafted += k
    return {"tokens": tokens[len(prompt) :][:new], "drafted": drafted, "accepted": sum(per_position), "per_position": per_position}

def run(case):
    target, target_config = build(case["target"])
    draft, config = build(case["draft"], is_draft_model=True, context_length=target_config.context_len)
    eagle, use, ids = getattr(config.hf_config, "eagle_config", None), True, None
    try:  # as model_runner_components/spec_aux_hidden_state.py reads them
        use = eagle.get("use_aux_hidden_state", True)
        ids = eagle["eagle_aux_hidden_state_layer_ids"]
    except Exception:
        ids = None
    configure_aux_hidden_state_capture(
        model=target, eagle_use_aux_hidden_state=use, eagle_aux_hidden_state_layer_ids=ids,
        dflash_use_aux_hidden_state=False, dflash_target_layer_ids=None, is_dspark=False,
    )
    embed, head = target.model.embed_tokens.weight, target.lm_head.weight
    if getattr(draft, "load_lm_head_from_target", False):  # as speculative/eagle_worker_v2.py shares them
        draft.set_embed_and_head(embed, head)
    else:
        draft.set_embed(embed)
    case["stage"] = "late"
    return {"answers": [speculate(target, draft, prompt, case["new"], case["k"]) for prompt in case["prompts"]]}

for line in sys.stdin:
    case = json.loads(line)
    try:
        with torch.no_grad():
            result = run(case)
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0], "stage": case.get("stage", "load")}
    CACHE.clear()
    gc.collect()
    print(json.dumps(result), file=reply, flush=True)
'''


class Sglang(Worker):
    def __init__(self) -> None:
        super().__init__(PYTHON, _WORKER, {"SGLANG_USE_CPU_ENGINE": "1"})

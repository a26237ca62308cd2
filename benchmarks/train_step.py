"""A training step (forward, backward, clipping, AdamW) of eyas against speculators 0.9.0 and SpecForge 0.2.0, on this CPU.

    .venv/bin/python tools/peers.py                                  # once: the peers' own environments
    .venv/bin/python benchmarks/train_step.py [--shapes smollm2] [--tokens 256 2048] [--steps 3 7] [--data all half]
                                              [--heads frozen trained] [--who eyas speculators specforge]

Every case runs in a process of its own: one document of T rows, random states, K steps, bf16 compute over fp32 masters.
Memory is the process's peak (ru_maxrss) less what it held after its imports. Finished cases are kept in --results and not
run again, so a long table can be made in parts; tables, ratios and the fit of memory against T are printed from all of it.
In "half" the first half of the document is prompt. eyas runs every supervised chain at every step here, as its peers do
with every row (`train.survivors`, its default, would run fewer).

What the peers needed to run on a CPU:
- speculators: attention "sdpa" (its flex attention has no backward on CPUs), its own eager KL loss (the fused one is
  Triton), fp32 weights under torch.autocast as in its trainer, its AdamW option (its default, Muon, does more work).
  It never trains the head; for "trained" its lm_head gets requires_grad.
- SpecForge: attention "sdpa", its compact teacher, its BF16Optimizer, its own reference loss in the place of the Triton
  kernel of the same file, triton and flash_attn absent (a stub satisfies `import triton`). Its torch.compile decorators
  stay: they use the C++ compiler of this machine, and compile before the clock starts.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

ROOT = Path(__file__).parents[1]
SHAPES = {
    "smollm2": dict(hidden=576, heads=9, kv=3, dim=64, inner=1536, vocab=49152, draft=8192),
    "qwen3-8b": dict(hidden=4096, heads=32, kv=8, dim=128, inner=12288, vocab=49152, draft=32000),
}
WHO = {"eyas": ".venv", "speculators": ".venv-speculators", "specforge": ".venv-specforge"}


def inputs(s, rows):
    """Tokens [T+1], auxiliary states [T+1, 3, H] and post-norm final states [T+1, H] in bf16, a head [V, H]."""
    torch.manual_seed(0)
    aux = torch.randn(rows + 1, 3, s.hidden).bfloat16()
    final = torch.randn(rows + 1, s.hidden).bfloat16()
    return torch.randint(0, s.draft, (rows + 1,)), aux, final, (torch.randn(s.vocab, s.hidden) * 0.02).bfloat16()


def eyas(s, rows, steps, half, trained):
    from eyas.draft.batch import pack
    from eyas.draft.config import DraftConfig
    from eyas.draft.model import Draft
    from eyas.features.store import Sample, teacher_positions
    from eyas.target import LogitRule

    tokens, aux, final, head = inputs(s, rows)
    config = DraftConfig(
        hidden_size=s.hidden, target_hidden_size=s.hidden, vocab_size=s.vocab, draft_vocab_size=s.draft,
        num_attention_heads=s.heads, num_key_value_heads=s.kv, head_dim=s.dim, intermediate_size=s.inner,
        aux_layers=(1, 3, 5), target_num_layers=8,
    )  # fmt: skip
    draft = Draft(config)
    draft.initialise(0)
    draft.embed_tokens.weight = torch.nn.Parameter(head.clone(), requires_grad=False)  # as the target's file has it
    draft.lm_head.weight.requires_grad_(trained)
    supervised = torch.arange(rows + 1) >= (rows // 2 if half else 0)
    where = teacher_positions(supervised.numpy())
    bits = [x.view(torch.int16).numpy().view("uint16") for x in (aux, final[where])]
    sample = Sample("a", tokens.int().numpy(), supervised.numpy(), *bits, tokens[where].int().numpy())
    batch = pack([sample]).to("cpu", torch.bfloat16)
    to_draft = torch.where(torch.arange(s.vocab) < s.draft, torch.arange(s.vocab), -1)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-4, fused=True)
    rule, scale, own = LogitRule(), 1 / batch.supervised, head[: s.draft].clone()

    def step():
        optimizer.zero_grad()
        draft.backward(draft.unroll(batch, steps, own, rule, to_draft, survivors=False, scale=scale).loss)
        torch.nn.utils.clip_grad_norm_([p for p in draft.parameters() if p.requires_grad], 1.0)
        optimizer.step()

    return step


def speculators(s, rows, steps, half, trained):
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.train.optimizers import build_optimizers
    from transformers import LlamaConfig

    tokens, aux, final, head = inputs(s, rows)
    layer = LlamaConfig(
        hidden_size=s.hidden, num_attention_heads=s.heads, num_key_value_heads=s.kv, head_dim=s.dim,
        intermediate_size=s.inner, vocab_size=s.vocab, num_hidden_layers=1, max_position_embeddings=8192,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=s.draft))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(head)
        for part in (model.lm_head, model.verifier_lm_head):
            part.weight.copy_(head[: s.draft])
    model.lm_head.weight.requires_grad_(trained)
    optimizers = build_optimizers(model, SimpleNamespace(optimizer="adamw", lr=1e-4, weight_decay=0.01))
    batch = dict(
        hidden_states=aux[:rows].flatten(1)[None],
        input_ids=tokens[None, 1:],
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        loss_mask=torch.arange(rows)[None] >= (rows // 2 if half else 0),
        verifier_last_hidden_states=final[None, 1:],
        ttt_steps=steps,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch)[1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return step


@contextmanager
def without_triton():
    """SpecForge imports triton and decorates kernels that no CPU run calls; torch and Transformers must not see the stub."""
    import torch._inductor.compile_fx  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedModel  # noqa: F401

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit, triton.language, language.constexpr = lambda f: f, language, int
    sys.modules |= {"triton": triton, "triton.language": language}
    yield
    del sys.modules["triton"], sys.modules["triton.language"]


def specforge(s, rows, steps, half, trained):
    with without_triton():
        from specforge.algorithms.eagle3 import model as code
        from specforge.core.loss import _compute_loss
        from specforge.modeling.draft import LlamaForCausalLMEagle3
        from specforge.optimizer import BF16Optimizer
        from transformers import LlamaConfig

    tokens, aux, final, head = inputs(s, rows)
    code.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    config = LlamaConfig(
        hidden_size=s.hidden, num_attention_heads=s.heads, num_key_value_heads=s.kv, head_dim=s.dim,
        intermediate_size=s.inner, vocab_size=s.vocab, draft_vocab_size=s.draft, max_position_embeddings=8192,
    )  # fmt: skip
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").bfloat16()
    draft.freeze_embedding()
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(head)
        draft.lm_head.weight.copy_(head[: s.draft])
    draft.lm_head.weight.requires_grad_(trained)
    draft.t2d.copy_(torch.arange(s.vocab) < s.draft)
    model = code.OnlineEagle3Model(draft, length=steps, attention_backend="sdpa")
    optimizer = BF16Optimizer(model, lr=1e-4)
    mask = (torch.arange(rows) >= (rows // 2 if half else 0)).int()[None, :, None]

    def step():
        losses = model(
            input_ids=tokens[None, 1:],
            attention_mask=torch.ones(1, rows, dtype=torch.bool),
            target=None,
            loss_mask=mask,
            hidden_states=aux[:rows].flatten(1)[None],
            target_hidden_for_compact=final[None, 1:],
            target_head_weight=head,
        )[0]
        sum(0.8**k * loss for k, loss in enumerate(losses)).backward()
        optimizer.step()

    return step


def measure(case):
    """In the process of one case: seconds of each timed step, and MiB of peak memory beyond the imports."""
    who, shape, rows, steps, data, heads = case
    s = SimpleNamespace(**SHAPES[shape])
    build = {"eyas": eyas, "speculators": speculators, "specforge": specforge}[who]
    build(SimpleNamespace(hidden=32, heads=2, kv=1, dim=16, inner=32, vocab=64, draft=32), 8, 1, False, False)()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # imports done, libraries awake
    step = build(s, rows, steps, data == "half", heads == "trained")
    if who == "specforge":
        step()  # compiles
    seconds, cpu, until = [], [], time.monotonic() + 6
    while len(seconds) < 3 or (len(seconds) < 5 and time.monotonic() < until):
        start, used = time.monotonic(), time.process_time()
        step()
        seconds.append(time.monotonic() - start)
        cpu.append(time.process_time() - used)
    seconds, cpu = seconds[1:], cpu[1:]  # the first one warmed up
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"wall": seconds, "cpu": cpu, "peak": (peak - before) / 1024}))


def line_fit(x, y):
    """Least squares y = a + b x; returns a, b and R²."""
    a = torch.stack([torch.ones(len(x)), torch.tensor(x, dtype=torch.float32)], 1).double()
    y = torch.tensor(y, dtype=torch.float64)
    solved = torch.linalg.lstsq(a, y[:, None]).solution[:, 0]
    left = (y - a @ solved).square().sum() / (y - y.mean()).square().sum().clamp_min(1e-9)
    return float(solved[0]), float(solved[1]), float(1 - left)


def report(found, clock):
    """Tables of tokens a second and MiB, eyas' ratios, and memory against T."""

    def speed_of(case):
        return case[2] / sorted(found[case][clock])[len(found[case][clock]) // 2]

    groups = sorted({case[1:] for case in found}, key=lambda c: (c[0], c[4], c[3], c[2], c[1]))
    print("| shape | head | data | K | T | who | tokens/s | peak MiB | eyas is faster by | eyas takes of its memory |")
    print("|---|---|---|--:|--:|---|--:|--:|--:|--:|")
    for group in groups:
        shape, rows, steps, data, heads = group
        ours = ("eyas", *group)
        for who in WHO:
            if (case := (who, *group)) not in found:
                continue
            compared = "| | |"
            if ours in found and who != "eyas":
                share = found[ours]["peak"] / found[case]["peak"]
                compared = f"| {speed_of(ours) / speed_of(case):.2f}x | {share:.2f} |"
            print(
                f"| {shape} | {heads} | {data} | {steps} | {rows:,} | {who} | {speed_of(case):,.0f} | {found[case]['peak']:,.0f} {compared}"
            )
    for who, data, steps in product(WHO, ("all", "half"), sorted({case[3] for case in found})):
        points = sorted((c[2], one["peak"]) for c, one in found.items()
                        if (c[0], c[1], c[3], c[4], c[5]) == (who, "smollm2", steps, data, "frozen"))  # fmt: skip
        if len(points) > 2:
            a, b, r = line_fit(*zip(*points, strict=True))
            print(f"memory of {who}, {data}, K = {steps}: {a:,.0f} MiB + {b * 1024:,.0f} KiB a row (R² {r:.4f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["smollm2"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--steps", nargs="+", type=int, default=[3, 7])
    parser.add_argument("--data", nargs="+", default=["all"], choices=["all", "half"])
    parser.add_argument("--heads", nargs="+", default=["frozen"], choices=["frozen", "trained"])
    parser.add_argument("--who", nargs="+", default=list(WHO), choices=WHO)
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "cpu"],
        help="cpu: seconds that a busy machine's processes used (set OMP_NUM_THREADS=1)",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "train_step.jsonl")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        who, shape, rows, steps, data, heads = options.one
        return measure((who, shape, int(rows), int(steps), data, heads))
    found = {}
    options.results.parent.mkdir(exist_ok=True)
    if options.results.exists():
        lines = [json.loads(line) for line in options.results.read_text().splitlines()]
        found = {tuple(line.pop("case")): line for line in lines}
    wanted = [
        (who, shape, rows, steps, data, heads)
        for shape in options.shapes for heads in options.heads for data in options.data
        for steps in options.steps for rows in options.tokens for who in options.who
    ]  # fmt: skip
    for case in wanted:
        if case in found:
            continue
        python = ROOT / WHO[case[0]] / "bin" / "python"
        command = [python, __file__, "--one", *map(str, case)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode:
            print(f"{' '.join(map(str, case))}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            continue
        found[case] = json.loads(done.stdout.splitlines()[-1])
        print(*case, found[case], file=sys.stderr, flush=True)
        with open(options.results, "a") as file:
            file.write(json.dumps({"case": case} | found[case]) + "\n")
    report(found, options.clock)


if __name__ == "__main__":
    main()

"""tau against minutes of training: eyas, and speculators 0.9.0's model and loss, on the same stored data on this CPU.

    .venv/bin/python tools/peers.py speculators                       # once
    .venv/bin/python benchmarks/quality.py examples/smollm2.yaml [--minutes 2] [--times 3] [--arms eyas default ours]

Needs the recipe's store and vocabulary (`eyas run RECIPE --until vocab`). eyas gets the minutes, speculators that many
times as many; each arm's rate schedule is spread over its own, all see the same documents and the recipe's K. Validation,
snapshots and imports are not counted, a start by least squares and reading are. tau is `eyas replay` of the held-out
conversations, for all arms. Where eyas ends above speculators' best it needs less than one --times-th of the time.

- eyas: the recipe's settings.
- default: speculators with its default settings (Muon, rate 1e-3, linear schedule with 1 % warm-up, equal weight of all
  steps, norm_before_residual, norm_before_fc, norm_output) in batches of 2,048 rows; its default of 8,192 makes masks of
  8,192 by 8,192 K that a CPU cannot use.
- ours: speculators' model and loss with the recipe's optimizer, rate, schedule, decay and rows a step.

speculators applies the target's final norm itself; the store holds states after it, so its verifier_norm becomes the
identity. It runs under torch.autocast in bf16 over fp32 weights, as its trainer does, with "sdpa" attention and its eager
loss (see train_step.py). With OMP_NUM_THREADS=1 minutes are CPU minutes. Its weights are read through eyas' own adapter for speculators' names.
"""

import argparse
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).parents[1]
CLOCK = time.process_time if torch.get_num_threads() == 1 else time.monotonic
ROWS = {"default": 2048}


def eyas_arm(run, folder, minutes, points):
    """(minutes, draft state) at each point; the trainer's own loop with a clock in the place of a count of steps."""
    settings = run.recipe.train.model_copy(update={"epochs": 100})
    start = CLOCK()
    trainer = run.trainer(folder, settings, "benchmark")
    trainer.total = 10_000
    spent, found, seen = CLOCK() - start, [], 0
    for epoch in range(settings.epochs):
        for index in range(len(trainer.plan[epoch])):
            start = CLOCK()
            trainer.step = int(spent / 60 / minutes * trainer.total)
            trainer.update(trainer.read(epoch, index))
            spent += CLOCK() - start
            seen += sum(trainer.lengths[i] for i in trainer.plan[epoch][index])
            if spent / 60 >= minutes * (len(found) + 1) / points:
                found.append((spent / 60, seen, {n: t.clone() for n, t in trainer.draft.served_state().items()}))
            if len(found) == points:
                return found
    raise SystemExit("more minutes than 100 epochs take")


def hand_over(run, folder):
    """Everything a peer needs, without eyas: documents, the target's rows, sizes."""
    from dataclasses import asdict

    from eyas.draft.batch import chain_depth, pack
    from eyas.draft.vocab import load
    from eyas.features.store import Store, teacher_positions

    store, documents = Store(run.store), []
    for name in run.parts()["train"]:
        sample = store.read(name)
        batch = pack([sample])
        final = torch.zeros(len(sample.tokens), batch.final.shape[1], dtype=torch.bfloat16)
        final[torch.from_numpy(teacher_positions(sample.supervised))] = batch.final
        mask = torch.from_numpy(chain_depth(sample.supervised) > 0)
        documents.append({"hidden": batch.aux, "tokens": batch.tokens, "final": final[1:], "mask": mask})
    names = [run.target.tensor_name(part) for part in ("embedding", "head")]
    vocab = load(run.folder / "vocab")
    torch.save(
        {
            "documents": documents,
            "embedding": run.target.read_tensor(names[0]),
            "head": run.target.read_tensor(names[1])[torch.from_numpy(vocab.targets)],
            "config": asdict(run.draft_config()),
            "train": run.recipe.train.model_dump(),
        },
        folder / "data.pt",
    )


def speculators_arm(folder, arm, minutes, points):
    """In speculators' environment: train, and write the state dict at each point."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.train.optimizers import build_optimizers
    from transformers import LlamaConfig

    data = torch.load(folder / "data.pt")
    c, ours = SimpleNamespace(**data["config"]), SimpleNamespace(**data["train"])
    torch.manual_seed(ours.seed)
    layer = LlamaConfig(
        hidden_size=c.hidden_size, num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim, intermediate_size=c.intermediate_size, vocab_size=c.vocab_size, num_hidden_layers=1,
        max_position_embeddings=c.max_position_embeddings, rope_parameters=c.rope_parameters,
        rms_norm_eps=c.rms_norm_eps, attn_implementation="sdpa",
    )  # fmt: skip
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=c.draft_vocab_size, **flags)
    )
    with torch.no_grad():
        model.embed_tokens.weight.copy_(data["embedding"])
        for part in (model.lm_head, model.verifier_lm_head):
            part.weight.copy_(data["head"])
    model.verifier_norm = torch.nn.Identity()
    if arm == "ours":
        how = SimpleNamespace(optimizer="adamw", lr=ours.lr, weight_decay=ours.weight_decay)
    else:
        how = SimpleNamespace(
            optimizer="muon", lr=1e-3, weight_decay=0.01, muon_lr=1e-3, muon_momentum=0.95, muon_weight_decay=0.1,
            muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
    optimizers = build_optimizers(model, how)
    warm, decay = (ours.warmup, ours.decay) if arm == "ours" else (0.01, 1.0)
    loss_config = resolve_loss_config("kl_div", "eager")

    def rate(progress):
        """The share of the base rate after this part of the minutes."""
        if progress < warm:
            return max(progress / warm, 0.01)
        left = (1 - progress) / (1 - warm)
        return 0.5 * (1 - math.cos(math.pi * left)) if arm == "ours" and ours.schedule == "cosine" else left

    spent = found = seen = 0.0
    for epoch in range(1000):
        order = torch.randperm(len(data["documents"]), generator=torch.Generator().manual_seed(epoch)).tolist()
        while order:
            start = CLOCK()
            pack = [data["documents"][order.pop()]]
            while order and sum(len(d["tokens"]) for d in [*pack, data["documents"][order[-1]]]) <= ROWS.get(
                arm, ours.batch_tokens
            ):
                pack.append(data["documents"][order.pop()])
            joined = {key: torch.cat([d[key] for d in pack])[None] for key in ("hidden", "tokens", "final", "mask")}
            lengths = [len(d["tokens"]) for d in pack]
            seen += sum(lengths)
            for optimizer in optimizers:
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] = how.lr * rate(spent / 60 / minutes)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(
                    hidden_states=joined["hidden"],
                    input_ids=joined["tokens"],
                    document_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
                    position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
                    loss_mask=joined["mask"],
                    verifier_last_hidden_states=joined["final"],
                    ttt_steps=ours.steps,
                    ttt_step_loss_decay=decay,
                    loss_config=loss_config,
                )[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            spent += CLOCK() - start
            if spent / 60 >= minutes * (found + 1) / points:
                found += 1
                state = {n: t for n, t in model.state_dict().items() if n not in ("d2t", "t2d")}
                torch.save(state | {"minutes": spent / 60, "seen": seen}, folder / f"{arm}-{found:.0f}.pt")
            if found == points:
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--times", type=float, default=3.0, help="the peer's minutes over eyas'")
    parser.add_argument("--points", type=int, default=3, help="snapshots of each arm, evenly spaced")
    parser.add_argument("--arms", nargs="+", default=["eyas", "default", "ours"], choices=["eyas", "default", "ours"])
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        return speculators_arm(Path(options.peer[0]), options.peer[1], options.minutes, options.points)

    from dataclasses import replace

    from eyas.decode.replay import accept
    from eyas.draft.model import Draft
    from eyas.draft.vocab import load
    from eyas.features.store import Store
    from eyas.recipe import read_recipe
    from eyas.run import Run
    from eyas.serving.names import from_any

    run = Run(read_recipe(options.recipe))
    vocab, heldout, store = load(run.folder / "vocab"), run.parts()["heldout"], Store(run.store)
    to_draft = torch.full((run.target.vocab_size,), -1)
    to_draft[torch.from_numpy(vocab.targets)] = torch.arange(len(vocab))

    def tau(state, **flags):
        draft = Draft(replace(run.draft_config(), **flags))
        draft.load_state_dict(state | {"d2t": torch.from_numpy(vocab.d2t), "t2d": torch.from_numpy(vocab.t2d)})
        return accept(draft, map(store.read, heldout), run.recipe.replay.k, to_draft, torch.bfloat16).tau

    print(f"{len(run.parts()['train'])} documents, held out {len(heldout)}, K = {run.recipe.train.steps}, "
          f"replayed with chains of {run.recipe.replay.k}")  # fmt: skip
    best = {}
    print("| arm | minutes | rows seen | tau |\n|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if set(options.arms) - {"eyas"}:
            hand_over(run, folder)
        for arm in options.arms:
            if arm == "eyas":
                found, flags = eyas_arm(run, folder / "eyas", options.minutes, options.points), {}
            else:
                python = ROOT / ".venv-speculators" / "bin" / "python"
                command = [
                    python,
                    __file__,
                    options.recipe,
                    "--minutes",
                    str(options.minutes * options.times),
                    "--points",
                    str(options.points),
                    "--peer",
                    name,
                    arm,
                ]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    print(f"{arm}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    continue
                states = [torch.load(folder / f"{arm}-{i + 1}.pt") for i in range(options.points)]
                found = [
                    (
                        s.pop("minutes"),
                        s.pop("seen"),
                        {from_any(n): t for n, t in s.items() if not n.startswith("verifier_")},
                    )
                    for s in states
                ]
                flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
            for minutes, seen, state in found:
                value = tau(state, **flags)
                best[arm] = value if arm == "eyas" else max(best.get(arm, 0.0), value)
                print(f"| {arm} | {minutes:.2f} | {seen:,.0f} | {value:.3f} |", flush=True)
    peers = {arm: value for arm, value in best.items() if arm != "eyas"}
    if peers and "eyas" in best:
        arm = max(peers, key=peers.__getitem__)
        ahead = "still ahead of" if best["eyas"] > peers[arm] else "not ahead of"
        print(f"eyas after {options.minutes:g} minutes ({best['eyas']:.3f}) is {ahead} speculators "
              f"after {options.minutes * options.times:g} ({arm}, {peers[arm]:.3f})")  # fmt: skip


if __name__ == "__main__":
    main()

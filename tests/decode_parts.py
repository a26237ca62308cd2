"""A tiny target and drafts of it that are right often enough for acceptance to mean something, in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import ROOT, save_tiny_target
from draft_parts import to_bits, to_draft_ids

from eyas.data.template import ChatTemplate
from eyas.draft.batch import pack
from eyas.draft.config import DraftConfig, draft_config_for
from eyas.draft.model import Draft
from eyas.features.store import Sample, teacher_positions
from eyas.target import LoadedTarget, LogitRule, load_target

SCALE = 0.15  # of what layers add to the stream: the next token depends on the last one above all


def prompts(count: int) -> list[dict]:
    """The shortest conversations of the example file, every eighth of them with several turns."""
    lines = (ROOT / "examples" / "prompts.jsonl").read_text("utf-8").splitlines()
    rows = sorted(
        ({"system": None, **json.loads(line)} for line in lines), key=lambda row: len(json.dumps(row["turns"]))
    )
    single, several = ([row for row in rows if (len(row["turns"]) > 1) is many] for many in (False, True))
    return [several[i // 8] if i % 8 == 7 else single[i - i // 8] for i in range(count)]


def sample_of(loaded: LoadedTarget, document: dict, layers: tuple[int, ...], exact: bool = False) -> Sample:
    """A document of `eyas generate` with its states, as a store would give it (bf16), or in float32."""
    keep = (lambda states: states.float().numpy()) if exact else to_bits
    tokens, mask = torch.tensor(document["tokens"]), np.zeros(len(document["tokens"]), dtype=bool)
    for start, end in document["spans"]:
        mask[start:end] = True
    with torch.no_grad():
        out = loaded.model(tokens[None], output_hidden_states=True)
    states = torch.stack([out.hidden_states[layer + 1][0] for layer in layers], 1)
    at = teacher_positions(mask)
    return Sample(
        id=document["id"],
        tokens=tokens.numpy().astype(np.int32),
        supervised=mask,
        aux=keep(states),
        final=keep(out.hidden_states[-1][0][at]),
        argmax=out.logits[0][at].argmax(-1).numpy().astype(np.int32),
    )


class Pair:
    """A random Llama of 6 layers, and drafts of it."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.loaded = load_target(save_tiny_target(folder, layers=6, hidden=48, seed=3), "float32")
        self.template = ChatTemplate(self.loaded.tokenizer)  # type: ignore[arg-type]
        self.loaded.head[self.loaded.tokenizer.eos_token_id] *= 2  # some answers end by themselves
        for layer in self.loaded.body.layers:
            layer.self_attn.o_proj.weight.data *= SCALE
            layer.mlp.down_proj.weight.data *= SCALE

    def random_draft(self, seed: int = 0, vocab: int = 220, **options: Any) -> Draft:
        config = draft_config_for(self.loaded.target, vocab, aux_layers=(0, 2, 4), **options)
        draft = Draft(config)
        draft.initialise(seed, 0.1)
        ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))[:vocab].sort().values
        draft.d2t.copy_(ids - torch.arange(vocab))
        draft.t2d[ids] = True
        draft.embed_tokens.weight.data.copy_(self.loaded.embedding)
        draft.lm_head.weight.data.copy_(self.loaded.head[ids])
        return draft

    def teach(self, draft: Draft, samples: list[Sample], steps: int = 200, k: int = 4) -> Draft:
        """Some seconds of training-time test: often right, often wrong, with margins so small that any wire shows."""
        trained = [p for p in draft.parameters() if p.requires_grad]
        optimizer, table = torch.optim.Adam(trained, 5e-3), to_draft_ids(draft)
        head = self.loaded.head[torch.arange(draft.config.draft_vocab_size) + draft.d2t]
        for step in range(steps):
            at = step * 8 % len(samples)
            batch = pack(samples[at : at + 8]).to("cpu", torch.float32)
            result = draft.unroll(batch, k, head, LogitRule(), table, scale=1 / batch.supervised, survivors=False)
            optimizer.zero_grad()
            draft.backward(result.loss)
            optimizer.step()
        return draft.requires_grad_(False)


def as_draft(config: DraftConfig, state: dict[str, torch.Tensor]) -> Draft:
    draft = Draft(config)
    draft.load_state_dict(state)
    return draft.requires_grad_(False)

"""A small target and drafts of it that are right often enough for acceptance to mean something, in float32."""

from pathlib import Path

import torch
from serving_parts import make_state

from engines import reference
from eyas.draft.config import draft_config_for
from eyas.serving.canary import words_tokenizer
from eyas.serving.export import export
from eyas.target import read_target

VOCAB, DRAFT_VOCAB, LAYERS = 320, 200, 12
PROMPTS = ([5, 17, 40, 3], [250, 9, 9, 100, 31, 7, 60], [11, 300])


class Pair:
    """A random Llama of 12 layers and a draft taught for a few seconds on its greedy texts, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(3)
        self.folder = folder
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, vocab_size=VOCAB, max_position_embeddings=1024, eos_token_id=2, bos_token_id=1, initializer_range=0.12,
            rope_parameters={"rope_type": "default", "rope_theta": 20000.0}, dtype="float32",
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).eval()
        self.model.lm_head.weight.data[2] = 0  # the end token is never the best one: the server would skip it
        for layer in self.model.model.layers:  # every layer turns the stream, so that a wrong layer shows
            layer.mlp.down_proj.weight.data *= 4
        self.model.save_pretrained(folder / "target")
        words_tokenizer(folder / "target", VOCAB)
        self.target = read_target(folder / "target")
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(3, VOCAB, (16, 6), generator=generator)
        texts = self.generate(starts, 40)
        texts += [text for prompt in PROMPTS for text in self.generate(torch.tensor([prompt]), 90)]
        self.texts = texts

    def generate(self, prompts: torch.Tensor, new: int) -> list[list[int]]:
        out = self.model.generate(prompts, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        return out.tolist()

    def draft(self, name: str, vocab: int = DRAFT_VOCAB, **options):
        config = draft_config_for(self.target, vocab, **options)
        state = {
            n: torch.ones(t.shape)
            if n.endswith(("norm.weight", "layernorm.weight"))
            else t.float() * (0.2 if n == "fc.weight" else 0.1)
            if "proj" in n or "fc" in n or "head" in n
            else t
            for n, t in make_state(config, self.target).items()
        }
        state["embed_tokens.weight"] = state["embed_tokens.weight"].float()
        state = reference.teach(self.model, state, config.to_dict(), self.texts)
        folder = export(state, config, self.target, self.folder / name, provenance={}, dtype="float32")
        return config, state, folder

"""Every family of targets: a tiny random model of the real Transformers class goes the whole way.

What eyas computes must be the model's own: its states, its teacher's logits (norms of (1 + w), scaled and soft-capped
logits included), its tensors on disk (tied, sharded, wrapped names).
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from eyas import audit
from eyas.draft.batch import pack
from eyas.draft.config import draft_config_for
from eyas.draft.model import Draft
from eyas.features.extract import extract
from eyas.features.store import Store
from eyas.serving.check import check
from eyas.serving.export import export
from eyas.target import LoadedTarget, load_target, read_target

VOCAB, LAYERS, HIDDEN = 300, 10, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_mtp_layers": 0, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": HIDDEN,
}  # fmt: skip


def text(**changes: Any) -> dict[str, Any]:
    return {**SIZES, **changes}


def causal(family: str, **changes: Any) -> Callable[[], Any]:
    """A text model: `family`ForCausalLM of `family`Config."""

    def make() -> Any:
        config = getattr(tf, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
        return getattr(tf, f"{family}ForCausalLM")(config(**text(**changes)))

    return make


def wrapped(family: str, vision: dict[str, Any], text_changes: dict[str, Any] | None = None, **outer: Any) -> Callable:
    """A multimodal wrapper around a text model."""

    def make() -> Any:
        config = getattr(tf, f"{family}Config")(text_config=text(**(text_changes or {})), vision_config=vision, **outer)
        return getattr(tf, f"{family}ForConditionalGeneration")(config)

    return make


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": causal("Llama"),
    "llama-tied": causal("Llama", tie_word_embeddings=True),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3"),
    "qwen3-moe": causal("Qwen3Moe", **MOE),
    "gemma": causal("Gemma"),
    "gemma2": causal("Gemma2", final_logit_softcapping=3.0),
    "gemma3": causal("Gemma3", final_logit_softcapping=5.0),
    "mistral": causal("Mistral"),
    "phi3": causal("Phi3"),
    "gpt-oss": causal("GptOss", **MOE),
    "glm4": causal("Glm4"),
    "glm4-moe": causal("Glm4Moe", **{**MLA, "num_key_value_heads": 2}),
    "deepseek-v3": causal("DeepseekV3", **MLA),
    "granite": causal("Granite", logits_scaling=7.0),
    "cohere": causal("Cohere", logit_scale=0.25),
    "cohere2": causal("Cohere2"),
    "qwen2.5-vl": wrapped("Qwen2_5_VL", VISION, {"rope_parameters": MROPE}),
    "qwen3-vl": wrapped("Qwen3VL", VISION | {"deepstack_visual_indexes": [0]}, {"rope_parameters": MROPE}),
    "gemma3-vl": wrapped("Gemma3", SIGLIP, mm_tokens_per_image=4),
    "kimi-k2.5": wrapped(
        "Kimi_K25", {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        MLA | {"model_type": "kimi_k2"}, projection_hidden_size=16, tie_word_embeddings=False,
    ),
}  # fmt: skip


def save(model: Any, folder: Path, tokenizer: Path, shard: str = "5GB") -> Path:
    with torch.no_grad():  # norms away from their start, so that a norm of another form shows
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory, tiny_target) -> LoadedTarget:
    torch.manual_seed(0)
    model = FAMILIES[request.param]()
    shard = "40KB" if request.param in ("qwen3", "qwen3-vl") else "5GB"
    folder = save(model, tmp_path_factory.mktemp("family") / request.param, tiny_target, shard)
    assert (folder / "model.safetensors.index.json").exists() == (shard == "40KB")
    return load_target(folder, dtype="float32")


def tokens(count: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB, (1, count)))


def test_states_and_teacher_are_the_models_own(loaded):
    ids = tokens()
    layers = list(range(LAYERS))
    with torch.inference_mode():
        with loaded.capturing(layers) as caught:
            output = loaded.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        for layer in layers[:-1]:  # the last entry of hidden_states is after the final norm
            torch.testing.assert_close(caught[layer], output.hidden_states[layer + 1], rtol=0, atol=0)
        teacher = loaded.logits(caught["final"])
    assert teacher.shape == (1, ids.shape[1], VOCAB)
    assert teacher.std() > 0.05
    torch.testing.assert_close(teacher, output.logits.float(), rtol=1e-5, atol=1e-5)


def test_the_body_alone_gives_the_same_states(loaded):
    """Extraction runs the body without its head, and without the wrapper around it."""
    ids = tokens(seed=1)
    with torch.inference_mode():
        with loaded.capturing([1, LAYERS - 1]) as whole:
            loaded.model(input_ids=ids, use_cache=False)
        with loaded.capturing([1, LAYERS - 1]) as alone:
            loaded.body(input_ids=ids, use_cache=False)
    for key in whole:
        torch.testing.assert_close(alone[key], whole[key], rtol=1e-5, atol=1e-5)


def test_tensors_are_found_on_disk(loaded):
    target = loaded.target
    for part, tensor in (("embedding", loaded.embedding), ("head", loaded.head), ("norm", loaded.body.norm.weight)):
        name = target.tensor_name(part)
        assert name is not None, (part, sorted(target.tensor_files))
        assert torch.equal(target.read_tensor(name), tensor.cpu()), (part, name)
    assert target.tied == (loaded.embedding.data_ptr() == loaded.head.data_ptr())
    assert (target.hidden_size, target.vocab_size, target.num_layers) == (HIDDEN, VOCAB, LAYERS)


def test_the_whole_way(loaded, tmp_path):
    """extract, audit, a few steps of training, audit, export, check."""
    target, rng = loaded.target, np.random.default_rng(0)
    documents = [
        {"id": f"d{i}", "tokens": rng.integers(3, VOCAB, 16 + i).tolist(), "spans": [[5, 16 + i]]} for i in range(4)
    ]
    config = draft_config_for(target, 64)
    extract(documents, loaded, tmp_path / "store", layers=list(config.aux_layers), threshold=0)
    store = Store(tmp_path / "store")
    samples = [store.read(name) for name in store.ids]

    chosen = np.unique(np.concatenate([[2], *(s.argmax for s in samples)]))
    chosen = torch.from_numpy(np.union1d(chosen, np.setdiff1d(np.arange(VOCAB), chosen)[: 64 - len(chosen)])).long()
    head = target.read_tensor(target.tensor_name("head") or "")[chosen]
    draft = Draft(config)
    draft.initialise(0)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.read_tensor(target.tensor_name("embedding") or ""))
        draft.lm_head.weight.copy_(head)
    draft.t2d[chosen] = True
    draft.d2t.copy_(chosen - torch.arange(64))
    batch = pack(samples).to("cpu", torch.float32)
    table = torch.full((VOCAB,), -1)
    table[chosen] = torch.arange(64)

    def dry_step() -> torch.Tensor:
        scale = 1 / batch.supervised
        loss = draft.unroll(batch, 2, head, target.logit_rule, table, survivors=False, scale=scale).loss
        draft.backward(loss)
        return loss.detach()

    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-3)
    sources = {"embed_tokens": "target", "lm_head": "target rows", "fc": "random"}
    supervised = sum(int(store.read(name).supervised.sum()) for name in store.ids)
    before = audit.audit_before(
        target, draft, teacher_head=head, optimizer=optimizer, sources=sources, store_meta=store.meta,
        store_figures={"tokens": int(store.lengths.sum()), "supervised_tokens": supervised}, vocab={"always": [2]}, policy_frozen={"embed_tokens"},
        dry_step=dry_step,
    )  # fmt: skip
    assert before["verdict"] == "go", before["reasons"]
    initial = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(float(dry_step()))
        optimizer.step()
    assert losses[-1] < losses[0]
    trained = draft.state_dict()
    export(trained, config, target, tmp_path / "draft", provenance={})
    after = audit.audit_after(initial, trained, {"embed_tokens"}, tmp_path / "draft", target, config)
    assert after["verdict"] == "go", after["reasons"]
    for engine in ("vllm", "sglang"):
        verdict = check(tmp_path / "draft", target, [engine])["verdicts"][engine]
        problems = [f for f in verdict["findings"] if f["severity"] == "error" and f["rule"] != "TARGET_ARCH"]
        assert not problems, problems


def test_logit_rules_are_read(loaded):
    rule, name = loaded.target.logit_rule, loaded.target.path.name
    softcap = {"gemma2": 3.0, "gemma3": 5.0}.get(name)
    scale = {"granite": 1 / 7, "cohere": 0.25, "cohere2": 0.0625}.get(name, 1.0)
    assert (rule.softcap, rule.scale) == (softcap, pytest.approx(scale))


def test_read_target_refuses_what_is_not_there(tmp_path):
    from eyas.errors import UsageError

    with pytest.raises(UsageError):
        read_target(tmp_path)

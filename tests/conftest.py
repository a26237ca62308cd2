"""Targets that many tests share: the real SmolLM2-135M and a tiny random Llama with a tokenizer of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Before anything imports torch: tests are small, and more threads than this only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parents[1]

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are brief.<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real SmolLM2-135M-Instruct (30 layers, hidden 576, bf16); made when it is not there."""
    folder = ROOT / "models" / "smollm2-135m"
    if not (folder / "config.json").exists():
        made = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "demo_target.py")], capture_output=True, text=True, timeout=600
        )
        if made.returncode:
            reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"models/smollm2-135m is not there and could not be made: {reason}")
    return folder


def save_tiny_target(folder: Path, layers: int = 10, hidden: int = 64, seed: int = 0) -> Path:
    """Save a random Llama (fp32, vocabulary 300, untied head) with a byte-level BPE and a ChatML template.

    The weights are drawn wider than usual, so that greedy answers depend on their prompt instead of repeating one
    token; a few answers end by themselves, most run to their length limit.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    prompts = (ROOT / "examples" / "prompts.jsonl").read_text("utf-8").splitlines()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((turn for line in prompts for turn in json.loads(line)["turns"]), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama (10 layers, hidden 64, vocabulary 300): made in a second, for whole-pipeline tests.

    Shared by the session: read it, do not change it.
    """
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")

"""A first recipe for a target, commented, with estimates of what it will cost."""

from eyas.audit import audit_config
from eyas.draft.config import draft_config_for
from eyas.target import read_target

TEMPLATE = """\
# A recipe for eyas. `eyas run` goes through all of it and can be cut off and started again at any time.
#
# Target: {architecture}, {layers} layers, hidden size {hidden:,}, vocabulary {vocab:,}, context {context:,}.
# Hidden states: {per_token:,} bytes a token (these layers and the final state), {gigabytes:.1f} GB per million tokens.
# Draft: about {trained:,.0f} M trained parameters with a draft vocabulary of {draft_vocab:,}.

target: {target}
run: runs/{name}

conversations:
  path: {conversations}      # JSONL, JSON, Parquet or a datasets folder; prompts or whole conversations
  heldout: 0.1               # share kept for acceptance figures, by conversation

generate:                    # the target writes the answers: on-policy data matter more than any other setting
  max_new_tokens: 1024
  slots: 64                  # conversations written at a time
  temperature: 0.0           # greedy; acceptance replayed from the store is exact for greedy data

extract:
  layers: {aux}              # physical outputs out(v); these are EAGLE-3's default
  codec: bf16

vocab:
  size: auto                 # or a number, or full

train:
  start: least_squares       # fc and attention begin from a regression; or random
  steps: 7                   # K of the training-time test
  epochs: 4
  batch_tokens: 4096         # rows of one optimizer step
  lr: 3.0e-4

export:
  engines: [sglang, vllm, llamacpp, openvino]

replay:
  k: 4
"""


def initial_recipe(target: str, conversations: str) -> str:
    """The recipe's text; reads the target's config only."""
    known = read_target(target)
    draft = draft_config_for(known, min(32_000, known.vocab_size))
    audit = audit_config(known, draft)
    per_token = audit["estimates"]["store_bytes_per_token"]
    return TEMPLATE.format(
        architecture=known.architecture,
        layers=known.num_layers,
        hidden=known.hidden_size,
        vocab=known.vocab_size,
        context=known.max_positions,
        per_token=per_token,
        gigabytes=per_token / 1e3,
        trained=audit["trained_params"] / 1e6,
        draft_vocab=draft.draft_vocab_size,
        target=target,
        name=target.rstrip("/").split("/")[-1].lower(),
        conversations=conversations,
        aux=list(draft.aux_layers),
    )

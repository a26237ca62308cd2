"""The audit must see each way in which a draft is not what its recipe says. Real drafts, real optimizers, real steps."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_parts import random_sample
from serving_parts import make_target

from eyas import audit
from eyas.draft.batch import pack
from eyas.draft.config import DraftConfig, draft_config_for
from eyas.draft.model import Draft
from eyas.serving.export import export
from eyas.target import Target, read_target

KIMI = Path(__file__).parents[1] / "examples" / "kimi-k2.5"
EOS = 2
FROZEN = {"embed_tokens"}
SOURCES = {
    "embed_tokens": "target model.embed_tokens.weight",
    "verifier_lm_head": "target lm_head.weight, rows of the draft vocabulary",
    "lm_head": "target lm_head.weight, rows of the draft vocabulary",
    "fc": "random N(0, 0.02), seed 0",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


class Bench:
    """A healthy draft about to train, with everything the audit looks at. A test breaks one thing."""

    def __init__(self, target: Target, vocab: int = 40, **options) -> None:
        self.target = target
        self.config = draft_config_for(target, vocab, **options)
        self.draft = Draft(self.config)
        self.draft.initialise(0)
        chosen = torch.arange(target.vocab_size) if self.draft.t2d is None else torch.arange(0, 2 * vocab, 2)
        head = target.read_tensor("lm_head.weight")
        with torch.no_grad():
            if self.draft.t2d is not None and self.draft.d2t is not None:
                self.draft.t2d[chosen] = True
                self.draft.d2t.copy_(chosen - torch.arange(vocab))
            self.draft.embed_tokens.weight.copy_(target.read_tensor("model.embed_tokens.weight"))
            self.draft.lm_head.weight.copy_(head[chosen])
        self.teacher = head[chosen].clone()
        self.optimizer: object = None
        self.policy: set[str] = set(FROZEN)
        self.sources = dict(SOURCES)
        self.vocab: dict = {"always": [0, EOS], "coverage": 0.99, "tau_ceiling": 4.7}
        self.store = {
            "layers": list(self.config.aux_layers),
            "hidden_size": target.hidden_size,
            "target": dict(target.fingerprints),
            "extra": {"dtype": "bfloat16", "vocab_size": target.vocab_size},
        }
        self.figures = {"tokens": 1000, "supervised_tokens": 600, "self_check": 0.98, "longest": 300}
        rng = np.random.default_rng(0)
        masks = ([False] * 4 + [True] * 9, [False] * 3 + [True] * 7)
        self.batch = pack([random_sample(rng, str(i), mask, self.config) for i, mask in enumerate(masks)])
        self.batch.argmax = chosen[self.batch.argmax % len(chosen)]  # every teacher position teaches

    def loss(self) -> torch.Tensor:
        draft, table = self.draft, torch.full((self.config.vocab_size,), -1)
        ids = torch.arange(self.config.draft_vocab_size)
        table[ids if draft.d2t is None else ids + draft.d2t] = ids
        head = self.teacher.float().to(draft.fc.weight.dtype)
        batch = self.batch.to("cpu", draft.fc.weight.dtype)
        scale = 1 / batch.supervised
        return draft.unroll(batch, 2, head, self.target.logit_rule, table, survivors=False, scale=scale).loss

    def dry_step(self) -> torch.Tensor:
        loss = self.loss()
        self.draft.backward(loss)
        return loss.detach()

    def before(self, plan: dict | None = None) -> dict:
        trainable = [p for n, p in self.draft.named_parameters() if not audit.is_frozen(n, self.policy)]
        return audit.audit_before(
            self.target, self.draft, teacher_head=self.teacher, optimizer=self.optimizer or torch.optim.AdamW(trainable),
            sources=self.sources, store_meta=self.store, store_figures=self.figures, vocab=self.vocab,
            policy_frozen=self.policy, dry_step=self.dry_step, plan=plan,
        )  # fmt: skip

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.draft.state_dict().items()}

    def train(self, steps: int = 4, lr: float = 1e-3) -> tuple[dict, dict]:
        initial = self.state()
        optimizer = torch.optim.AdamW([p for p in self.draft.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
        for _ in range(steps):
            optimizer.zero_grad()
            self.draft.backward(self.loss())
            optimizer.step()
        return initial, self.state()


@pytest.fixture
def bench(target) -> Bench:
    return Bench(target)


def component(result: dict, name: str) -> dict:
    return next(c for c in result["components"] if c["name"] == name)


def refused(result: dict, *words: str) -> None:
    """NO-GO, and one reason that says all the words."""
    assert result["verdict"] == "no-go"
    assert any(all(word in reason for word in words) for reason in result["reasons"]), result["reasons"]


# from configs alone


def test_kimi_figures_from_its_config_alone():
    target = read_target(KIMI)
    result = audit.audit_config(target, audit.config_for_audit(target))
    expected = {
        "embed_tokens": (1_174_405_120, "frozen"),
        "verifier_lm_head": (229_376_000, "frozen"),
        "fc": (154_140_672, "trained"),
        "lm_head": (229_376_000, "trained"),
    }
    for name, (size, state) in expected.items():
        assert (component(result, name)["params"], component(result, name)["state"]) == (size, state)
    assert result["verdict"] == "go" and result["reasons"] == []
    assert result["trained_params"] == 1_190_948_864 and result["total_params"] == 2_594_729_984
    assert sum(c["params"] for c in result["components"]) == result["total_params"]
    assert result["trained_params"] + result["frozen_params"] == result["total_params"]
    assert result["estimates"]["optimizer_bytes"] == 8 * result["trained_params"]


def test_the_config_audit_needs_no_torch():
    code = (
        "import sys; from eyas import audit; from eyas.target import read_target;"
        f"t = read_target({str(KIMI)!r}); audit.audit_config(t, audit.config_for_audit(t)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"fc_norm": True}, {"norm_before_fc": True, "qk_norm": True}, {"attention_bias": True, "num_layers": 2}],
)
def test_sizes_are_those_of_a_real_draft_on_the_meta_device(target, options):
    config = draft_config_for(target, 40, **options)
    with torch.device("meta"):
        draft = Draft(config)
    result = audit.audit_config(target, config)
    teacher = component(result, "verifier_lm_head")["params"]
    assert result["total_params"] - teacher == sum(p.numel() for p in draft.parameters())
    assert result["trained_params"] == sum(p.numel() for n, p in draft.named_parameters() if n != "embed_tokens.weight")
    assert component(result, "layers.0.mlp")["params"] == sum(p.numel() for p in draft.layers[0].mlp.parameters())


def test_config_that_does_not_belong_to_the_target(target):
    config = draft_config_for(target, 40).to_dict()
    refused(audit.audit_config(target, DraftConfig.from_dict(config | {"vocab_size": 95})), "vocabulary 95", "96")
    refused(audit.audit_config(target, DraftConfig.from_dict(config | {"target_num_layers": 13})), "layers 13")
    narrow = DraftConfig.from_dict(config | {"hidden_size": 16})
    refused(audit.audit_config(target, narrow), "embed_tokens", "random numbers would be frozen")
    assert audit.audit_config(target, narrow, frozen=set())["verdict"] == "go"


def test_policy_is_compared_with_other_trainers(target):
    def differs(frozen):
        rows = audit.audit_config(target, draft_config_for(target, 40), frozen=frozen)["policy"]["conventions"]
        return {row["name"]: row["differs"] for row in rows}

    ours = differs({"embed_tokens"})
    assert ours["speculators >= 0.5"] == ["freezes lm_head, this recipe trains it"]
    assert ours["SpecForge 0.2"] == [] == ours["EAGLE-3 paper code"]
    frozen_head = differs({"embed_tokens", "lm_head"})
    assert frozen_head["speculators >= 0.5"] == []
    assert frozen_head["EAGLE-3 paper code"] == ["trains lm_head, this recipe freezes it"]


def test_a_policy_that_names_nothing_is_refused(target):
    refused(audit.audit_config(target, draft_config_for(target, 40), frozen={"embed_token"}), "'embed_token'")


# before training


@pytest.mark.parametrize("vocab", [40, 96])
def test_a_healthy_draft_may_train(target, vocab):
    bench = Bench(target, vocab)
    result = bench.before()
    assert result["verdict"] == "go", result["reasons"]
    checks = {c["name"]: c["check"] for c in result["components"]}
    assert set(checks.values()) == {"ok"}, checks
    assert "bitwise equal" in component(result, "embed_tokens")["detail"]
    assert ("d2t" in checks) == (vocab == 40)
    assert all(p.grad is None for p in bench.draft.parameters())
    json.dumps(result)


def test_a_head_that_begins_at_random_may_train_and_is_named(bench):
    torch.nn.init.normal_(bench.draft.lm_head.weight, std=0.02)
    bench.sources["lm_head"] = "random N(0, 0.02), seed 0"
    result = bench.before()
    assert result["verdict"] == "go", result["reasons"]
    spec = next(r for r in result["policy"]["conventions"] if r["name"] == "speculators >= 0.5")
    assert "begins lm_head from the target's rows, this recipe from random" in spec["differs"]
    bench.sources["lm_head"] = SOURCES["lm_head"]
    refused(bench.before(), "lm_head", "said to be", "differs")


def test_embedding_random_but_frozen(bench):
    torch.nn.init.normal_(bench.draft.embed_tokens.weight)
    refused(bench.before(), "embed_tokens", "frozen, but not the target's")


def test_embedding_wrong_in_one_bit(bench):
    weight = bench.draft.embed_tokens.weight.data
    weight[95, 31] = torch.nextafter(weight[95, 31], torch.tensor(torch.inf))
    refused(bench.before(), "embed_tokens", "not the target's")


def test_embedding_trained_by_mistake(bench):
    bench.draft.embed_tokens.weight.requires_grad_(True)
    result = bench.before()
    refused(result, "embed_tokens", "requires_grad")
    refused(result, "embed_tokens", "got a gradient")


def test_frozen_tensor_in_the_optimizer(bench):
    bench.optimizer = torch.optim.AdamW(bench.draft.parameters())
    refused(bench.before(), "embed_tokens", "in the optimizer")


def test_teacher_head_not_matching_the_map(bench):
    bench.teacher = bench.target.read_tensor("lm_head.weight")[:40].clone()
    refused(bench.before(), "verifier_lm_head", "rows named by t2d")


def test_trainable_tensor_missing_from_the_optimizer(bench):
    bench.optimizer = torch.optim.AdamW([p for n, p in bench.draft.named_parameters() if n not in ("embed_tokens.weight", "fc.weight")])  # fmt: skip
    refused(bench.before(), "fc.weight", "no optimizer group")


def test_trainable_tensor_in_two_optimizers(bench):
    own = [p for n, p in bench.draft.named_parameters() if n != "embed_tokens.weight"]
    bench.optimizer = [torch.optim.AdamW(own), torch.optim.SGD([bench.draft.fc.weight], lr=0.1)]
    refused(bench.before(), "fc.weight", "more than once")


def test_head_tied_to_the_embedding(target):
    bench = Bench(target, 96)
    bench.draft.lm_head.weight = bench.draft.embed_tokens.weight
    refused(bench.before(), "share memory")


def test_head_tied_to_the_teacher(bench):
    bench.teacher = bench.draft.lm_head.weight.detach()
    refused(bench.before(), "verifier_lm_head.weight", "lm_head.weight", "share memory")


def test_parameter_frozen_by_a_reload(bench):
    bench.draft.layers[0].mlp.requires_grad_(False)
    result = bench.before()
    refused(result, "layers.0.mlp", "requires_grad is off")
    refused(result, "layers.0.mlp", "no gradient")


def test_a_reload_that_unfreezes_everything(bench):
    bench.draft.requires_grad_(True)
    refused(bench.before(), "embed_tokens", "would be trained")


def test_norm_that_cannot_move_in_bf16(bench):
    bench.draft.layers[0].to(torch.bfloat16)
    bench.dry_step = None  # type: ignore[method-assign]
    refused(bench.before(), "layers.0.norms", "bfloat16", "cannot move")


@pytest.mark.parametrize(
    ("part", "words"), [("weights", "weights"), ("chat_template", "chat template"), ("tokenizer", "tokenizer")]
)
def test_store_of_another_target(bench, part, words):
    bench.store["target"][part] = "0" * 64
    refused(bench.before(), "another", words)


def test_store_of_other_layers_or_width(bench):
    bench.store["layers"] = [2, 5, 8]
    refused(bench.before(), "out(2, 5, 8)", "out(1, 5, 8)")
    bench.store["layers"] = [1, 5]
    refused(bench.before(), "fc reads 96", "2 x 32")


def test_store_whose_samples_do_not_fit(bench):
    bench.figures["longest"] = 513
    refused(bench.before(), "513", "512")
    bench.figures |= {"longest": 512, "self_check": 0.2}
    refused(bench.before(), "20.0%")
    bench.figures |= {"self_check": 0.7, "supervised_tokens": 0}
    result = bench.before()
    refused(result, "0 of 1,000 tokens are supervised")
    assert any("70.0%" in note for note in result["notes"])


def test_map_without_its_end_token(bench):
    bench.draft.t2d[EOS] = False
    bench.draft.t2d[1] = True
    where = torch.nonzero(bench.draft.t2d).flatten()
    bench.draft.d2t.copy_(where - torch.arange(40))
    with torch.no_grad():
        bench.teacher = bench.target.read_tensor("lm_head.weight")[where]
        bench.draft.lm_head.weight.copy_(bench.teacher)
    result = bench.before()
    refused(result, "end token 2", "never end")
    assert component(result, "verifier_lm_head")["check"] == "ok"
    bench.vocab["always"] = [0, 3]
    refused(bench.before(), "special tokens 3")


def test_map_of_absolute_ids(bench):
    ids = torch.nonzero(bench.draft.t2d).flatten()
    bench.draft.d2t.copy_(ids)
    bench.dry_step = None  # type: ignore[method-assign]
    refused(bench.before(), "d2t", "outside the vocabulary")


def test_map_that_was_never_filled(bench):
    bench.draft.d2t.zero_()
    refused(bench.before(), "never filled")


def test_map_other_than_the_vocabulary_stage(bench):
    bench.vocab["d2t"] = (bench.draft.d2t + 1).numpy()
    refused(bench.before(), "not the map of the vocabulary stage")


def test_map_of_the_first_ids_may_be_the_one_that_was_chosen(bench):
    """Every real token of a padded vocabulary: ids 0 to Vd - 1, as in a map that was never filled."""
    bench.draft.d2t.zero_()
    bench.draft.t2d.copy_(torch.arange(96) < 40)
    with torch.no_grad():
        bench.teacher = bench.target.read_tensor("lm_head.weight")[:40].clone()
        bench.draft.lm_head.weight.copy_(bench.teacher)
    refused(bench.before(), "never filled")
    bench.vocab["d2t"] = np.zeros(40, np.int64)
    assert bench.before()["verdict"] == "go"


def test_values_that_are_not_numbers(bench):
    bench.draft.fc.weight.data[0, 0] = torch.nan
    result = bench.before()
    refused(result, "fc", "NaN")
    refused(result, "loss", "nan")


def test_what_is_told_of_the_vocabulary(bench):
    bench.vocab |= {"coverage": 0.9, "untrained_rows": 7}
    notes = " ".join(bench.before()["notes"])
    assert "10.00%" in notes and "tau 4.70" in notes and "7 tokens" in notes


# after training


def test_after_training_and_export(bench, tmp_path):
    initial, trained = bench.train()
    export(trained, bench.config, bench.target, tmp_path / "draft", provenance={})
    result = audit.audit_after(initial, trained, FROZEN, tmp_path / "draft", bench.target, bench.config)
    assert result["verdict"] == "go", result["reasons"]
    assert "bitwise" in component(result, "embed_tokens")["detail"]
    assert "moved by" in component(result, "layers.0.norms")["detail"]
    assert any("exported tensors equal" in c["detail"] for c in result["checks"])


def test_the_embedding_may_be_left_out_of_the_first_state(bench):
    initial, trained = bench.train(1)
    del initial["embed_tokens.weight"]
    assert audit.audit_after(initial, trained, FROZEN, None, bench.target, bench.config)["verdict"] == "go"
    trained["embed_tokens.weight"][3, 3] += 1
    result = audit.audit_after(initial, trained, FROZEN, None, bench.target, bench.config)
    refused(result, "embed_tokens", "differs from the target's")


def test_frozen_tensor_that_moved(bench):
    bench.draft.embed_tokens.weight.requires_grad_(True)
    initial, trained = bench.train(2)
    result = audit.audit_after(initial, trained, FROZEN, None, bench.target, bench.config)
    refused(result, "embed_tokens", "frozen but differs")


def test_trained_tensor_that_did_not_move(bench):
    bench.draft.layers[0].self_attn.o_proj.requires_grad_(False)
    initial, trained = bench.train(2)
    result = audit.audit_after(initial, trained, FROZEN, None, bench.target, bench.config)
    refused(result, "layers.0.self_attn.o_proj.weight", "did not move")


def test_norms_stuck_in_bf16(bench):
    """Real training with bf16 masters: the matrices move, the norms stand at exactly 1."""
    bench.draft.to(torch.bfloat16)
    initial, trained = bench.train(4, lr=1e-3)
    result = audit.audit_after(initial, trained, FROZEN, None, bench.target, bench.config)
    assert component(result, "fc")["check"] == "ok"
    refused(result, "norm.weight", "exactly 1.0")


def test_checkpoint_with_nan_or_without_a_tensor(bench):
    initial, trained = bench.train(1)
    broken = trained | {"fc.weight": trained["fc.weight"].clone().fill_(torch.nan)}
    refused(audit.audit_after(initial, broken, FROZEN, None, bench.target, bench.config), "fc.weight", "NaN")
    del trained["norm.weight"], trained["d2t"]
    result = audit.audit_after(initial, trained, FROZEN, None, bench.target, bench.config)
    refused(result, "norm.weight", "missing")
    refused(result, "d2t", "missing")


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_export_with_another_config(bench, tmp_path, key):
    """Nothing but the config tells an engine these, so the tensors may all be right."""
    initial, trained = bench.train(1)
    export(trained, bench.config, bench.target, tmp_path / "draft", provenance={})
    file = tmp_path / "draft" / "config.json"
    config = json.loads(file.read_text())
    config[key] = 0.5
    config["rope_parameters"] |= {key: 0.5} if key == "rope_theta" else {}
    file.write_text(json.dumps(config))
    result = audit.audit_after(initial, trained, FROZEN, tmp_path / "draft", bench.target, bench.config)
    refused(result, "exported config differs", "rope_parameters" if key == "rope_theta" else key)


def test_nothing_is_said_of_a_start_that_is_not_known(bench):
    """After training nobody knows how the head began; a head that began at random must not be said to differ."""
    torch.nn.init.normal_(bench.draft.lm_head.weight, std=0.02)
    initial, trained = bench.train(1)
    result = audit.audit_after(initial, trained, FROZEN, None, bench.target, bench.config)
    assert not any("begins" in text for row in result["policy"]["conventions"] for text in row["differs"])


def test_export_of_another_checkpoint(bench, tmp_path):
    initial, trained = bench.train(2)
    export(initial, bench.config, bench.target, tmp_path / "draft", provenance={})
    result = audit.audit_after(initial, trained, FROZEN, tmp_path / "draft", bench.target, bench.config)
    refused(result, "differs from the checkpoint", "fc.weight")
    result = audit.audit_after(initial, trained, FROZEN, tmp_path, bench.target, bench.config)
    refused(result, "cannot be read")


# showing


def test_markdown_and_table_say_the_verdict(bench):
    from rich.console import Console

    torch.nn.init.normal_(bench.draft.embed_tokens.weight)
    result = bench.before()
    page = audit.to_markdown(result)
    assert page.startswith("# Audit (before): NO-GO") and result["reasons"][0] in page
    assert all(f"`{c['name']}`" in page for c in result["components"])
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(audit.table(result))
    shown = console.export_text()
    assert "NO-GO" in shown and "embed_tokens" in shown and "3,072" in shown


def test_a_first_loss_worse_than_a_uniform_guess_is_noted(bench):
    assert not any("uniform guess" in note for note in bench.before(plan={"steps": 2})["notes"])
    with torch.no_grad():
        bench.draft.norm.weight.mul_(1000)
    result = bench.before(plan={"steps": 2})
    assert result["verdict"] == "go" and any("uniform guess" in note for note in result["notes"])

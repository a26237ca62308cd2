"""Folders of other programs' states, made here in their layouts, healthy and harmed."""

import gzip
import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import EyasError, UsageError
from eyas.features import foreign, health
from eyas.features.codec import to_float
from eyas.features.record import mask_of, teacher_positions
from eyas.features.store import Store
from eyas.target import LoadedTarget, load_target

LAYERS = [1, 4, 6]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> LoadedTarget:
    return load_target(tiny_target)


@pytest.fixture(scope="module")
def rows(target: LoadedTarget) -> list[dict]:
    """Greedy conversations with what Transformers says of them."""
    result = []
    for number in range(6):
        tokens = torch.randint(0, 300, (6,), generator=torch.Generator().manual_seed(number)).tolist()
        for _ in range(30 + number):
            with torch.inference_mode():
                out = target.model(torch.tensor([tokens]), output_hidden_states=True)
            tokens.append(int(out.logits[0, -1].argmax()))
        before: list[torch.Tensor] = []
        handle = target.body.norm.register_forward_pre_hook(lambda _, inputs, kept=before: kept.append(inputs[0]))
        with torch.inference_mode():
            out = target.model(torch.tensor([tokens]), output_hidden_states=True)
        handle.remove()
        result.append(
            {
                "id": f"doc-{number}",
                "category": "maths",
                "tokens": tokens,
                "spans": [[6, len(tokens)]],
                "aux": torch.stack([out.hidden_states[layer + 1][0] for layer in LAYERS], 1).bfloat16(),
                "before": before[0][0].bfloat16(),
                "after": out.hidden_states[-1][0].bfloat16(),
            }
        )
    return result


def speculators(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        states = torch.cat([row["aux"], row["before"][:, None]], 1)
        save_file(
            {"hidden_states": states, "token_ids": torch.tensor(row["tokens"])}, folder / f"hs_{number}.safetensors"
        )
    return folder


def specforge(folder: Path, rows: list[dict], zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        mask = torch.from_numpy(mask_of(row["spans"], len(row["tokens"]))).long()
        value = {
            "input_ids": torch.tensor([row["tokens"]]),
            "loss_mask": mask[None],
            "aux_hidden_state": row["aux"].flatten(1)[None],
            "hidden_state": row["after"][None],
        }
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = gzip.compress(buffer.getvalue()) if zipped else buffer.getvalue()
        (folder / f"data_{number}.ckpt{'.gz' if zipped else ''}").write_bytes(data)
    return folder


@pytest.mark.parametrize("layout", ["speculators", "specforge", "gzip"])
def test_import_gives_the_targets_own_states(
    layout: str, target: LoadedTarget, rows: list[dict], tmp_path: Path
) -> None:
    if layout == "speculators":
        source, documents = speculators(tmp_path / "in", rows), rows
    else:
        source, documents = specforge(tmp_path / "in", rows, layout == "gzip"), None
    assert health.verify(source, deep=True)["bad"] == []
    found = foreign.import_(source, tmp_path / "s", target, layers=LAYERS, documents=documents, codec="bf16z")
    assert found["imported"] == 6 and found["bad"] == [] and found["self_check"] > 0.95
    store = Store(tmp_path / "s")
    for number, row in enumerate(rows):
        sample = store.read(row["id"] if documents else f"data_{number}")
        at = teacher_positions(mask_of(row["spans"], len(row["tokens"])))
        assert sample.tokens.tolist() == row["tokens"]
        assert np.array_equal(sample.aux, row["aux"].view(torch.int16).numpy().view(np.uint16))
        assert np.abs(to_float(sample.final) - row["after"][at].float().numpy()).max() < 0.05
    assert health.verify(tmp_path / "s", deep=True)["bad"] == []


def harm(name: str, source: Path, rows: list[dict]) -> None:
    file = source / "hs_2.safetensors"
    row = dict(rows[2])
    states = torch.cat([row["aux"], row["before"][:, None]], 1)
    tokens = torch.tensor(row["tokens"])
    if name == "cut":
        os.truncate(file, file.stat().st_size - 100)
        return
    if name == "header":
        os.truncate(file, 20)
        return
    if name == "short":
        states = states[:-5]
    elif name == "swapped":
        states = states.transpose(0, 1).contiguous()
    elif name == "nan":
        states[3, 1, 7] = torch.nan
    elif name == "layers":
        states = states[:, 1:].contiguous()
    elif name == "dtype":
        states = states.float()
    elif name == "tokens":
        tokens = tokens.flip(0)
    elif name == "tail":
        states[-1] = 0
    save_file({"hidden_states": states.contiguous(), "token_ids": tokens}, file)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cut", "cut off"),
        ("header", "header"),
        ("short", r"33 states for 38 tokens.*prefix cache"),
        ("swapped", "axes swapped"),
        ("nan", "NaN at position 3, layer slot 1, channel 7"),
        ("layers", "most files have"),
        ("dtype", "F32"),
        ("tokens", "not those of document 2"),
        ("tail", "all zeros"),
    ],
)
def test_verify_names_the_bad_file_and_why(name: str, reason: str, rows: list[dict], tmp_path: Path) -> None:
    source = speculators(tmp_path, rows)
    harm(name, source, rows)
    report = health.verify(source, deep=True, documents=rows)
    assert [row["sample"] for row in report["bad"]] == ["hs_2.safetensors"] and report["ok"] == 5
    import re

    assert re.search(reason, report["bad"][0]["reason"]), report["bad"]
    assert report["format"] == "speculators" and report["bytes"] == sum(f.stat().st_size for f in source.iterdir())


def test_import_sees_that_the_norm_was_already_applied(target: LoadedTarget, rows: list[dict], tmp_path: Path) -> None:
    """A file in the speculators layout whose last state is the normed one; the norm's weights must differ to tell."""
    weight = target.body.norm.weight
    kept = weight.clone()
    try:
        with torch.no_grad():
            weight[:] = torch.linspace(-3, 3, len(weight))
        made = [dict(row, tokens=list(row["tokens"])) for row in rows]
        for row in made:
            at = len(row["tokens"]) - 1
            for step in range(6, at + 1):  # greedy again, under the changed norm
                with torch.inference_mode():
                    out = target.model(torch.tensor([row["tokens"][:step]]))
                row["tokens"][step] = int(out.logits[0, -1].argmax())
            with torch.inference_mode():
                out = target.model(torch.tensor([row["tokens"]]), output_hidden_states=True)
            row["before"] = out.hidden_states[-1][0].bfloat16()  # normed, despite the layout
        source = speculators(tmp_path / "in", made)
        found = foreign.import_(source, tmp_path / "s", target, layers=LAYERS, documents=made)
        assert found["imported"] == 6 and found["self_check"] > 0.95
    finally:
        with torch.no_grad():
            weight[:] = kept


def test_import_leaves_bad_files_out(target: LoadedTarget, rows: list[dict], tmp_path: Path) -> None:
    source = speculators(tmp_path / "in", rows)
    harm("nan", source, rows)
    (source / "hs_9.safetensors").write_bytes(b"\x10")
    found = foreign.import_(source, tmp_path / "s", target, layers=LAYERS, documents=rows)
    assert found["imported"] == 5 and {row["sample"] for row in found["bad"]} == {
        "hs_2.safetensors",
        "hs_9.safetensors",
    }


def test_import_refuses_states_of_other_conversations(target: LoadedTarget, rows: list[dict], tmp_path: Path) -> None:
    rolled = [
        dict(row, before=rows[i - 1]["before"][:36].repeat(2, 1)[: len(row["tokens"])]) for i, row in enumerate(rows)
    ]
    source = speculators(tmp_path / "in", rolled)
    with pytest.raises(EyasError, match="argmax of its final states"):
        foreign.import_(source, tmp_path / "s", target, layers=LAYERS, documents=rows)
    assert not health.info(tmp_path / "s")["complete"]


def test_import_with_a_wrong_layer_count_or_no_mask(target: LoadedTarget, rows: list[dict], tmp_path: Path) -> None:
    source = speculators(tmp_path / "in", rows)
    found = foreign.import_(source, tmp_path / "a", target, layers=[1, 4], documents=rows)
    assert found["imported"] == 0 and all("3 auxiliary layers, 2 were named" in row["reason"] for row in found["bad"])
    found = foreign.import_(source, tmp_path / "b", target, layers=LAYERS)
    assert found["imported"] == 0 and all("no loss mask" in row["reason"] for row in found["bad"])


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch /tmp/eyas-evil-pickle",)


def test_a_pickle_runs_nothing(tmp_path: Path, rows: list[dict]) -> None:
    source = specforge(tmp_path, rows)
    torch.save({"input_ids": Evil()}, source / "data_9.ckpt")
    os.truncate(source / "data_1.ckpt", 500)
    report = health.verify(source)
    assert {row["sample"] for row in report["bad"]} == {"data_1.ckpt", "data_9.ckpt"}
    assert "weights_only" in report["bad"][-1]["reason"] and not Path("/tmp/eyas-evil-pickle").exists()
    assert report["format"] == "torch"


def test_a_folder_without_states(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match="neither a feature store nor"):
        health.verify(tmp_path)

"""The report page and the closing summary, from a run folder as the stages leave it, whole and in parts."""

import html
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from eyas.errors import UsageError
from eyas.report import words
from eyas.report.figures import palette, ticks
from eyas.report.page import read_log, read_run, write_report
from eyas.report.summary import summary_lines

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROTOCOL = {
    "shape": "chain",
    "k": 4,
    "temperature": 0.0,
    "loaded_as": "own",
    "prompts": 62,
    "tokens": 13204,
    "data": "held-out conversations",
}
PROTOCOL_TEXT = "chain, K = 4, temperature 0, held-out conversations (62 prompts, 13,204 tokens), loaded as own"
SHA = "3f1a" * 16
SERVE = {
    "sglang": "python -m sglang.launch_server --model-path models/SmolLM2-135M-Instruct --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path runs/smollm2/draft --speculative-num-steps 4 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 5",
    "vllm": "vllm serve models/SmolLM2-135M-Instruct --speculative-config "
    '\'{"method": "eagle3", "model": "runs/smollm2/draft", "num_speculative_tokens": 4}\'',
}
STAGES = {
    "conversations": ({"conversations": 620, "multi_turn": 148, "categories": 7}, 0.4),
    "answers": ({"tokens": 132040, "tokens_per_s": 612.4, "finish": {"stop": 571, "length": 49}}, 216),
    "store": (
        {"samples": 620, "tokens": 171338, "bytes": 1_403_220_992, "bytes_per_token": 8190, "codec": "bf16"},
        121,
    ),
    "vocab": ({"size": 8192, "coverage": 0.9871, "untrained_rows": 214}, 0.8),
    "audit": ({"verdict": "go", "trained_params": 10_321_152, "frozen_params": 33_030_144}, 0.6),
    "train": ({"steps": 620, "epochs": 4, "tokens_per_s": 583.1, "tau": 2.36, "final_loss": 2.87}, 742),
    "draft": ({"bytes": 106_954_752, "dtype": "bfloat16", "tau": 2.34, "protocol": PROTOCOL}, 1.2),
    "check": ({"engines": 4, "errors": 0, "warnings": 1}, 0.3),
    "replay": ({"tau": 2.34, "rounds": 5634, "tokens_per_s": 21840.0}, 18),
}
CATEGORIES = {"maths": 2.71, "code": 2.55, "extraction": 2.48, "reasoning": 2.3, "translation": 2.21, "writing": 2.02}
WORDS = [
    "The", "quick", "answer", "is", "that", "a", "river", "bends", "because", "water", "is", "slower", "on", "the",
    "inner", "bank", ",\n", "and", "so", "sand", "stays", ".",
]  # fmt: skip


def tokens(count: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    said = [{"text": word + " ", "state": "prompt"} for word in ["<|im_start|>user\n", *WORDS[:9], "<|im_end|>\n"]]
    while len(said) < count:
        kept = rng.choice([0, 0, 0, 1, 1, 2, 4])
        states = ["accepted"] * kept + (["rejected"] if kept < 4 else []) + ["bonus"]
        said += [{"text": rng.choice(WORDS) + " ", "state": state} for state in states]
    return said


def fill(run: Path, stages: list[str] | None = None) -> Path:
    """A run folder of SmolLM2's size. Test data: shaped like the real files, the values are made up."""
    chosen = list(STAGES) if stages is None else stages
    rng = random.Random(0)
    files: dict[str, object] = {}
    for name in chosen:
        figures, seconds = STAGES[name]
        files[f"{name}/manifest.json"] = {
            "kind": name,
            "inputs": {"target": SHA},
            "figures": figures,
            "seconds": seconds,
        }
    if "replay" in chosen:
        by_category = {
            name: {"tau": tau, "low": tau - 0.12, "high": tau + 0.14, "rounds": 800 + 31 * i, "tokens": 1900 + 77 * i}
            for i, (name, tau) in enumerate(CATEGORIES.items())
        }
        worst = [
            {"id": f"writing-{i:03d}", "category": "writing", "tau": 1.2 + 0.06 * i, "tokens": tokens(150 + 300 * i, i)}
            for i in range(4)
        ]
        files["replay/replay.json"] = {
            "tau": 2.34,
            "accept_rate": 0.335,
            "per_position": [0.612, 0.371, 0.224, 0.133],
            "protocol": PROTOCOL,
            "speedup": 1.62,
            "lossless": None,
            "by_category": by_category,
            "interval": [2.27, 2.41],
            "worst": worst,
        }
        files["decode/decode.json"] = files["replay/replay.json"] | {  # type: ignore[operator]
            "tau": 2.31,
            "per_position": [0.604, 0.366, 0.215, 0.125],
            "speedup": 1.41,
            "lossless": True,
            "protocol": PROTOCOL | {"data": "examples/prompts.jsonl", "prompts": 200, "tokens": 41230},
        }
    if "audit" in chosen:
        rows = [
            ("embed_tokens", 28_311_552, "frozen", "copied from the target", "ok", "bit for bit equal to the target's"),
            (
                "verifier_lm_head",
                4_718_592,
                "frozen",
                "rows of the target's head",
                "ok",
                "teacher only, never exported",
            ),
            ("lm_head", 4_718_592, "trained", "initialised from the target's rows", "ok", ""),
            ("fc", 995_328, "trained", "random", "ok", ""),
            ("layers.0", 4_604_544, "trained", "random", "ok", "one Llama-style layer"),
            ("norms", 2_304, "trained", "ones", "ok", ""),
            ("d2t", 8_192, "buffer", "draft vocabulary", "not checked", "int64 offsets"),
        ]
        keys = ("name", "params", "state", "source", "check", "detail")
        files["audit/audit.json"] = {
            "components": [dict(zip(keys, row, strict=True)) for row in rows],
            "total_params": 43_351_296,
            "trained_params": 10_321_152,
            "frozen_params": 33_030_144,
            "verdict": "go",
            "reasons": [],
        }
    if "check" in chosen:
        finding = {
            "rule": "layer-numbering",
            "severity": "warn",
            "message": "The config names auxiliary layers as in(k); llama.cpp's converter expects out(v).",
            "fix": "Export with --as llamacpp.",
            "tensors": ["fc.weight"],
        }
        files["check/check.json"] = {
            "draft": "runs/smollm2/draft",
            "target": "models/SmolLM2-135M-Instruct",
            "verdicts": {
                "sglang": {"verdict": "pass", "findings": []},
                "vllm": {"verdict": "pass", "findings": [finding | {"severity": "info", "fix": None, "tensors": []}]},
                "llamacpp": {"verdict": "warn", "findings": [finding]},
                "openvino": {"verdict": "pass", "findings": []},
            },
        }
    if "vocab" in chosen:
        curve = [[n, 1 - 0.45 * math.exp(-n / 2300)] for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 49152)]
        files["vocab/vocab.json"] = {
            "size": 8192,
            "coverage": curve[5][1],
            "curve": curve,
            "tau_ceiling": 4.87,
            "k": 4,
            "oov_share": 1 - curve[5][1],
            "untrained_rows": 214,
        }
    if "draft" in chosen:
        files["draft/eyas.json"] = {
            "target": {"name": "SmolLM2-135M-Instruct", "fingerprint": SHA},
            "aux_layers": [1, 14, 26],
            "vocabulary": {"size": 8192, "coverage": 0.9871},
            "acceptance": {"tau": 2.34, "protocol": PROTOCOL},
            "versions": {"eyas": "0.1.0", "torch": "2.13.0"},
        }
        files["summary.json"] = {"serve": SERVE, "draft": "runs/smollm2/draft"}
    if "answers" in chosen:
        files["preview.json"] = [
            {
                "id": f"maths-{i:03d}",
                "category": "maths",
                "tokens": [
                    {"text": t["text"], "supervised": t["state"] != "prompt", "special": t["text"].startswith("<|")}
                    for t in tokens(90, i)
                ],
            }
            for i in range(3)
        ]
    for name, content in files.items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), "utf-8")
    if "train" in chosen:
        lines = []
        for step in range(1, 621):
            fade = math.exp(-step / 140)
            line = {
                "step": step,
                "epoch": step / 155,
                "loss": 2.8 + 6.2 * fade + rng.gauss(0, 0.12),
                "acc": [max(0.0, (0.62 - 0.07 * k) * (1 - fade) + rng.gauss(0, 0.015)) for k in range(4)],
                "lr": 1e-3 * min(step / 30, 0.5 + 0.5 * math.cos(math.pi * step / 620)),
                "grad_norm": 0.8 + 3 * fade + abs(rng.gauss(0, 0.1)),
                "tokens_per_s": 583 + rng.gauss(0, 9),
                "data_wait": 0.004,
                "oov": 0.0129 + rng.gauss(0, 0.002),
            }
            lines.append(json.dumps(line))
            if step % 155 == 0:
                tau = {155: 1.86, 310: 2.12, 465: 2.29, 620: 2.36}[step]
                by_category = {name: tau + value - 2.34 for name, value in CATEGORIES.items()}
                figures = {"tau": tau, "per_position": [0.6, 0.4, 0.2, 0.1], "by_category": by_category}
                figures["protocol"] = PROTOCOL
                lines.append(json.dumps({"step": step, "validation": figures}))
        (run / "train" / "log.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.yaml").write_text("target: models/SmolLM2-135M-Instruct\ntrain:\n  epochs: 4\n", "utf-8")
    return run


class Page(HTMLParser):
    """Ids, tags, attributes and text of a page; checks that every tag is closed in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.inside: list[tuple[int, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        if "id" in found:
            self.ids.append(found["id"])
        if tag not in self.VOID:
            self.open.append(tag)
            if "id" in found:
                self.inside.append((len(self.open), found["id"]))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"
        while self.inside and self.inside[-1][0] > len(self.open):
            self.inside.pop()

    def handle_data(self, data):
        for _, name in self.inside:
            self.text[name] = self.text.get(name, "") + data

    def count(self, tag: str, **attributes: str) -> int:
        return sum(name == tag and attributes.items() <= found.items() for name, found in self.tags)


SECTIONS = ["pipeline", "acceptance", "training", "vocabulary", "audit", "serving", "preview", "provenance"]
FIGURES = [
    "fig-where-the-time-went",
    "fig-acceptance-per-position",
    "fig-acceptance-length-per-category",
    "fig-loss",
    "fig-accuracy-per-step-of-the-unroll",
    "fig-acceptance-length-over-training",
    "fig-learning-rate",
    "fig-gradient-norm",
    "fig-throughput",
    "fig-outside-the-draft-vocabulary",
    "fig-coverage-of-the-draft-vocabulary",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("runs") / "smollm2")


@pytest.fixture(scope="module")
def source(run) -> str:
    path = write_report(run)
    assert path == run / "report.html"
    return path.read_text("utf-8")


@pytest.fixture(scope="module")
def page(source) -> Page:
    return Page(source)


def test_every_part_is_there(page):
    assert [name for name in SECTIONS if name not in page.ids] == []
    assert [name for name in FIGURES if name not in page.ids] == []
    assert [
        name for name in ("headline", "measurements", "categories", "worst", "serve", "check") if name not in page.ids
    ] == []
    assert len(page.ids) == len(set(page.ids))
    assert page.count("table") == 5
    assert page.count("svg") == len(FIGURES)
    anchors = {found["href"].removeprefix("#") for tag, found in page.tags if tag == "a"}
    assert anchors == set(SECTIONS)


def test_every_figure_has_title_axes_and_words(page, source):
    for name in FIGURES:
        body = re.search(rf'<figure id="{name}">.*?</figure>', source, re.S).group()
        assert re.search(r"<figcaption><strong>[^<]+</strong>", body)
        assert f'aria-labelledby="{name}-t {name}-d"' in body
        assert len(page.text[f"{name}-d"]) > 40
        assert len(re.findall(r'class="axis">[^<]+<', body)) == 2, name
        assert "nan" not in body and "inf" not in body


def test_nothing_is_loaded_and_no_script_runs(page, source):
    assert not any(tag in {"script", "link", "img", "iframe", "object", "base"} for tag, _ in page.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|@font-face", source)
    assert not any(name.startswith("on") for _, found in page.tags for name in found)
    policy = [found["content"] for tag, found in page.tags if found.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_figures_are_those_of_the_files(page):
    headline = " ".join(page.text["headline"].split())
    assert "2.34 tokens per round" in headline and "interval 2.27 to 2.41" in headline and PROTOCOL_TEXT in headline
    assert "×1.62" in headline and "GO" in headline and "llama.cpp warn" in headline
    pipeline = page.text["pipeline"]
    for said in (
        "132,040",
        "612 tokens/s",
        "1.31 GiB",
        "8,190 bytes/token",
        "stop 571, length 49",
        "12 min 22 s",
        "98.7 %",
    ):
        assert said in pipeline, said
    assert "18 min 20 s in all" in pipeline
    assert "28,311,552" in page.text["audit"] and "33,030,144 frozen" in page.text["audit"]
    assert [words.continued(command) in page.text["serve"] for command in SERVE.values()] == [True, True]
    assert "8,192: 98.7 %" in page.text["vocabulary"]
    assert "1: 61.2 %, 2: 37.1 %, 3: 22.4 %, 4: 13.3 %" in page.text["fig-acceptance-per-position-d"]
    assert "3f1a3f1a3f1a…" in page.text["provenance"]
    assert page.count("span", **{"class": "t rejected"}) > 20
    assert page.count("span", **{"class": "t supervised"}) > 20


def test_long_conversations_are_cut_and_it_is_said(page):
    whole = tokens(1050, 3)
    assert f"… {len(whole) - 600:,} tokens more …" in page.text["worst"]


def test_a_tau_without_its_protocol_is_withheld(tmp_path):
    run = fill(tmp_path / "bare")
    for name in (
        "replay/replay.json",
        "decode/decode.json",
        "draft/manifest.json",
        "vocab/vocab.json",
        "draft/eyas.json",
    ):
        found = json.loads((run / name).read_text())
        for part in (found, found.get("figures", {}), found.get("acceptance", {})):
            part.pop("protocol", None)
            part.pop("k", None)
        (run / name).write_text(json.dumps(found))
    text = write_report(run).read_text("utf-8")
    assert not re.search(r"\b2\.3[14]\b|\b4\.87\b|2\.71", text)
    assert text.count(words.WITHHELD) == 4  # draft and replay in the pipeline, the vocabulary's ceiling, eyas.json
    said = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    said.print(summary_lines(run), soft_wrap=True)
    assert "2.34" not in said.export_text()


@pytest.mark.parametrize("count", range(len(STAGES)))
def test_missing_stages_are_named(tmp_path, count):
    done = list(STAGES)[:count]
    run = fill(tmp_path / "partial", done)
    (run / list(STAGES)[count]).mkdir()
    (run / list(STAGES)[count] / "half").write_text("x")
    text = write_report(run).read_text("utf-8")
    page = Page(text)
    states = [stage["state"] for stage in read_run(run)["stages"]]
    assert states == ["done"] * count + ["unfinished"] + ["not run yet"] * (len(STAGES) - count - 1)
    assert [name for name in SECTIONS if name not in page.ids] == []
    for stage, part in {"train": "training", "vocab": "vocabulary", "audit": "audit", "replay": "acceptance"}.items():
        assert ("Not run yet" in page.text[part]) == (stage not in done)


def without_each_key(found, path=()):
    """Every copy of a JSON value that lacks one key or has null there, at any depth (of lists, the first entry)."""
    if isinstance(found, list) and found and isinstance(found[0], dict | list):
        for part, entry in without_each_key(found[0], (*path, 0)):
            yield part, [entry, *found[1:]]
    if isinstance(found, dict):
        for key, inner in found.items():
            yield (*path, key), {name: entry for name, entry in found.items() if name != key}
            yield (*path, key, "null"), found | {key: None}
            for part, entry in without_each_key(inner, (*path, key)):
                yield part, found | {key: entry}


@pytest.mark.parametrize(
    "name",
    [
        "replay/replay.json",
        "audit/audit.json",
        "check/check.json",
        "vocab/vocab.json",
        "draft/eyas.json",
        "summary.json",
    ],
)
def test_absent_keys_are_coped_with(tmp_path, name):
    run = fill(tmp_path / "run", [part for part in STAGES if part == "draft" or name.startswith(part)])
    found = json.loads((run / name).read_text())
    for entry in found.get("worst", []):
        entry["tokens"] = entry["tokens"][:20]
    broken = []
    for path, entry in without_each_key(found):
        (run / name).write_text(json.dumps(entry))
        try:
            Page(write_report(run).read_text("utf-8"))
            Console(file=open(os.devnull, "w")).print(summary_lines(run))  # noqa: SIM115
        except Exception as error:
            broken.append((path, repr(error)))
    assert broken == []


def test_hostile_text_stays_text(tmp_path):
    run = fill(tmp_path / "x<script>alert(1)</script>")
    found = json.loads((run / "replay/replay.json").read_text())
    bad = '"><script>alert(2)</script><img src=x onerror=alert(3)>'
    found["worst"][0] |= {"id": bad, "tokens": [{"text": bad, "state": bad}]}
    found["by_category"] = {bad: found["by_category"]["maths"]}
    (run / "replay/replay.json").write_text(json.dumps(found))
    page = Page(write_report(run).read_text("utf-8"))
    assert page.count("script") == page.count("img") == 0
    assert bad in page.text["worst"] and bad in page.text["fig-acceptance-length-per-category-d"]


def test_bad_input_is_one_sentence_and_leaves_the_old_page(tmp_path):
    with pytest.raises(UsageError, match="no such run folder"):
        write_report(tmp_path / "nowhere")
    run = fill(tmp_path / "run")
    before = write_report(run).read_bytes()
    (run / "audit/audit.json").write_text('{"components": [')
    with pytest.raises(UsageError, match=r"audit\.json: not valid JSON"):
        write_report(run)
    assert (run / "report.html").read_bytes() == before
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_the_log_survives_a_resume_and_a_kill(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"step": 1, "epoch": 0.5, "loss": 9}\n{"step": 2, "epoch": 1.0, "loss": 8}\n{"step": 2, "validation": {"tau": 1.5}}\n'
        '{"step": 2, "epoch": 1.0, "loss": 7}\n{"step": 3, "epoch": 1.5, "loss": NaN}\n{"step": 4, "lo'
    )
    steps, validations = read_log(path)
    assert [line["step"] for line in steps] == [1, 2, 3] and steps[1]["loss"] == 7
    assert validations == [{"step": 2, "validation": {"tau": 1.5}, "epoch": 1.0}]
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UsageError, match="line 2"):
        read_log(path)


def test_steps_left_out_are_counted(tmp_path):
    """As the trainer logs a step whose loss or gradient was not finite: it has neither loss nor accuracy."""
    run = fill(tmp_path / "run")
    with open(run / "train" / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"step": 621, "epoch": 4.0, "skipped": true, "tokens_per_s": 600.0, "data_wait": 0.01}\n')
    assert ("steps left out (loss or gradient not finite)", "1") in read_run(run)["training"]


def test_a_no_go_after_training_is_shown(tmp_path):
    run = fill(tmp_path / "run")
    found = json.loads((run / "audit/audit.json").read_text()) | {"accepted": "a try"}
    (run / "audit/audit.json").write_text(json.dumps(found))
    after = {"verdict": "no-go", "reasons": ["norm: norm.weight did not move in training."]}
    (run / "audit/after.json").write_text(json.dumps(after))
    page = Page(write_report(run).read_text("utf-8"))
    for part in ("headline", "audit"):
        assert "NO-GO" in page.text[part] and "did not move" in page.text[part] and "a try" in page.text[part]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(summary_lines(run), soft_wrap=True)
    assert "NO-GO" in console.export_text()


def test_the_summary_is_one_screen_and_its_commands_can_be_copied(run):
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(summary_lines(run), soft_wrap=True)
    text = console.export_text()
    flat = " ".join(text.split())
    assert PROTOCOL_TEXT in flat and "2.34 (2.27 to 2.41)" in flat and "×1.62 expected" in flat
    assert "GO" in flat and "llama.cpp warn" in flat and "runs/smollm2/draft" in flat and "train 12 min 22 s" in flat
    assert len(text.splitlines()) <= 30
    for engine, command in SERVE.items():
        start = text.index("serve with " + {"sglang": "SGLang", "vllm": "vLLM"}[engine])
        copied = text[start:].split("\n", 1)[1].split("\n\n")[0]
        assert shell_arguments(copied) == shlex.split(command)


def test_the_summary_of_an_empty_run(tmp_path):
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(summary_lines(tmp_path), soft_wrap=True)
    assert "not run yet" in console.export_text()


def shell_arguments(command: str) -> list[str]:
    """What a real shell makes of a command line."""
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {command.strip()}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


ARGUMENT = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=40)


@settings(deadline=None)
@given(st.lists(ARGUMENT | ARGUMENT.map("--{}".format), min_size=1, max_size=12))
def test_continued_commands_mean_the_same(arguments):
    assert shell_arguments(words.continued(shlex.join(arguments))) == arguments


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 6))
def test_ticks_are_round_and_inside(low, span, about):
    high = low + span
    found = ticks(low, high, about)
    assert 1 <= len(found) <= about + 1
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in found)
    assert found == sorted(found)


def test_colours_are_apart():
    for n in range(1, 9):
        assert len(set(palette(n))) == n


@pytest.mark.parametrize(
    ("key", "found", "said"),
    [
        ("bytes", 1_403_220_992, "1.31 GiB"),
        ("seconds", 4000, "1 h 07 min"),
        ("seconds", 59.7, "1 min 00 s"),
        ("read_bytes_per_s", 5.0, "5 bytes/s"),
        ("tokens_per_s", 612.4, "612 tokens/s"),
        ("coverage", 0.9871, "98.7 %"),
        ("accept_rate", 0.5, "50 %"),
        ("tokens", 132040, "132,040"),
        ("lossless", True, "yes"),
        ("speedup", 1.6, "×1.60"),
        ("speedup", None, "–"),
        ("loss", math.nan, "not a number"),
        ("finish", {"stop": 2, "length": 1}, "stop 2, length 1"),
        ("fingerprint", SHA, "3f1a3f1a3f1a…"),
    ],
)
def test_values_have_units(key, found, said):
    assert words.value(key, found) == said


def test_what_a_protocol_does_not_state_is_said():
    assert words.protocol_text(PROTOCOL) == PROTOCOL_TEXT
    assert words.protocol_text({"shape": "tree", "k": 3}) == (
        "tree, K = 3, temperature not stated, data not stated (prompts and tokens not stated), loader not stated"
    )
    assert words.protocol_text({}) == words.protocol_text(None) == ""


# the page in a real browser

PROBE = """<!doctype html><title>waiting</title><iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>
<script>
onload = () => {{
  const inner = document.querySelector("iframe").contentDocument, root = inner.documentElement;
  const wide = [...inner.querySelectorAll("body *")].filter(e => !e.closest(".table, svg") &&
    e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.tagName + "." + e.className);
  const drawn = [...inner.querySelectorAll("figure")].filter(f => !f.closest("details")).map(f => f.querySelector("svg"))
    .filter(s => s.getBoundingClientRect().height > 80).length;
  const outside = [...inner.querySelectorAll("svg text")].filter(t => !t.closest("details")).filter(t => {{
    const a = t.getBoundingClientRect(), b = t.closest("figure").getBoundingClientRect();
    return a.left < b.left || a.right > b.right + 1 }}).map(t => t.textContent);
  const ground = inner.defaultView.getComputedStyle(inner.body).backgroundColor;
  document.title = JSON.stringify({{wide, drawn, outside, ground, scroll: root.scrollWidth - root.clientWidth}});
}};
</script>"""


def browse(tmp_path: Path, *arguments: str) -> str:
    quiet = "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet.split()]
    command += [f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False), (340, True)])
def test_a_browser_lays_it_out(tmp_path, source, width, dark):
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(width=width, page=html.escape(source)), "utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    out = browse(tmp_path, scheme, "--window-size=1280,900", "--virtual-time-budget=4000", "--dump-dom", probe.as_uri())
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", out).group(1)))
    assert found["wide"] == [] and found["outside"] == [] and found["scroll"] == 0
    assert found["drawn"] == len(FIGURES) - 4  # four lie in a closed fold
    assert found["ground"] == ("rgb(20, 23, 26)" if dark else "rgb(250, 249, 246)")
    assert not re.search(r"CONSOLE.*(Refused|Error)", out)

"""The command line: parse, call, print; nothing else. Heavy modules are imported by the command that needs them."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas import __version__
from eyas.errors import EyasError, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train EAGLE-3 drafters and prove that they fly.",
)
store_app = typer.Typer(no_args_is_help=True, help="The feature store of hidden states.")
app.add_typer(store_app, name="store")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
StorePath = Annotated[str, typer.Argument(help="A folder, or an address such as s3://bucket/store.")]
RecipePath = Annotated[Path, typer.Argument(help="The recipe (YAML).")]
Depth = Annotated[int | None, typer.Option("--k", min=1, help="Tokens drafted in a round (4).")]
TreeShape = Annotated[str | None, typer.Option(help="TOTAL,DEPTH,TOPK: a dynamic tree in place of a chain.")]
AsEngine = Annotated[str | None, typer.Option("--as", help="Load the draft as sglang, vllm, llamacpp, ... would.")]
IntoRun = Annotated[Path | None, typer.Option(help="A run folder: keep the figures there and show them in its report.")]
Accept = Annotated[str | None, typer.Option(help="Go on after a NO-GO; the reason is recorded.")]


def show(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)  # a pipe or file has no width of its own


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.callback(invoke_without_command=True)
def version(show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show_version:
        print(f"eyas {__version__}")
        raise typer.Exit


@app.command()
def run(
    recipe: RecipePath,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    redo: Annotated[str | None, typer.Option(help="Make this stage and all that follows from it anew.")] = None,
    accept: Accept = None,
    as_json: Json = False,
) -> None:
    """The main job: from conversations to a proven draft. Resumable: run the same command again."""
    from eyas import run as pipeline
    from eyas.recipe import read_recipe

    job = pipeline.Run(read_recipe(recipe), accept)
    if redo:
        pipeline.redo(job, redo)
    report = pipeline.run_all(job, until, say)
    if as_json:
        figures = {name: manifest.figures | {"seconds": manifest.seconds} for name, manifest in job.done.items()}
        show({"run": str(job.folder), "report": str(report) if report else None, "stages": figures})
    elif report:
        from eyas.report.summary import summary_lines

        console().print(summary_lines(job.folder), soft_wrap=True)


def run_stage(verb: str, recipe: Path, accept: str | None, as_json: bool) -> None:
    from eyas import run as pipeline
    from eyas.recipe import read_recipe

    job = pipeline.Run(read_recipe(recipe), accept)
    stage = pipeline.STAGES_BY_NAME[pipeline.VERBS[verb]]
    fresh = pipeline.perform(job, stage)
    manifest = job.done[stage.name]
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first rank speaks
    if as_json:
        show({"stage": stage.name, "folder": str(job.folder / stage.name)} | manifest.figures)
    else:
        say(f"{stage.name}: {'done' if fresh else 'stands'}")
        _print_pairs(manifest.figures)


def stage_command(verb: str, text: str) -> None:
    """One verb that runs one stage of a recipe, when the stages before it stand."""

    def command(recipe: RecipePath, accept: Accept = None, as_json: Json = False) -> None:
        run_stage(verb, recipe, accept, as_json)

    app.command(verb, help=text)(command)


stage_command("prepare", "Read, clean and split the conversations of a recipe.")
stage_command("generate", "Let the target answer them: on-policy token ids and supervised spans.")
stage_command("extract", "Store the target's hidden states for these answers.")
stage_command("vocab", "Choose the draft vocabulary from the supervised tokens.")


@app.command()
def train(
    recipe: RecipePath,
    refine: Annotated[
        bool, typer.Option("--refine", help="A finished draft trains on, with more weight where it was rejected.")
    ] = False,
    accept: Accept = None,
    as_json: Json = False,
) -> None:
    """Train the draft (training-time test), or go on with it."""
    if not refine:
        run_stage("train", recipe, accept, as_json)
        return
    from eyas.recipe import read_recipe
    from eyas.run import Run
    from eyas.train.refine import refine as refine_draft

    found = refine_draft(Run(read_recipe(recipe)))
    show(found) if as_json else _print_pairs(found)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A recipe that was trained, or with --out the folder of any draft.")],
    out: Annotated[Path | None, typer.Option(help="Write it here, in another form or for one engine.")] = None,
    layout: Annotated[str, typer.Option(help="portable, speculators, eagle or gguf.")] = "portable",
    engine: Annotated[str | None, typer.Option(help="The one engine that it is for: sglang, vllm, ...")] = None,
    target: Annotated[str | None, typer.Option(help="Its target (default: the recipe's).")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    embed: Annotated[bool, typer.Option("--embed", help="Write embed_tokens too, though it is the target's.")] = False,
    shard_gb: Annotated[
        float | None, typer.Option(min=0.001, help="Split the weights into files of this size.")
    ] = None,
    vocabulary: Annotated[Path | None, typer.Option(help="For gguf: the target's GGUF.")] = None,
    accept: Accept = None,
    as_json: Json = False,
) -> None:
    """Write the trained draft for the engines (RUN/draft), or any draft in another layout."""
    if out is None and not source.is_dir():
        run_stage("export", source, accept, as_json)
        return
    from eyas.recipe import read_recipe
    from eyas.serving import export as e

    if out is None:
        raise UsageError(f"eyas export {source}: a folder. Say with --out where its other form goes.")
    recipe = None if source.is_dir() else read_recipe(source)
    folder, named = (Path(recipe.run) / "draft", target or recipe.target) if recipe else (source, target)
    size = int(shard_gb * 1e9) if shard_gb else None
    form: dict[str, Any] = {"layout": layout, "dtype": dtype, "embed": embed, "engine": engine, "shard_bytes": size}
    limits = e.convert(folder, named, out, vocabulary=vocabulary, **form)
    files = sorted(file.name for file in out.iterdir())
    if as_json:
        show({"draft": str(out), "layout": layout, "engine": engine, "files": files, "not_for": limits})
        return
    print(f"{out}: {', '.join(files)}")
    for name, reasons in limits.items():
        print(f"not for {name}: {'; '.join(reasons)}")


@app.command()
def init(
    target: Annotated[str, typer.Option(help="Hugging Face folder or hub name.")],
    conversations: Annotated[str, typer.Option(help="Prompts or conversations.")] = "examples/prompts.jsonl",
    out: Annotated[Path, typer.Option(help="Where to write the recipe.")] = Path("recipe.yaml"),
    as_json: Json = False,
) -> None:
    """Write a commented recipe for a target, with estimates of disk and tokens."""
    from eyas.files import write_text
    from eyas.initial import initial_recipe

    if out.exists():
        raise UsageError(f"{out}: exists already. Name another file with --out, or remove it.")
    write_text(out, initial_recipe(target, conversations))
    if as_json:
        show({"recipe": str(out)})
    else:
        print(f"{out}: written. Read it, then: eyas run {out}")


@app.command()
def preview(
    source: Annotated[Path, typer.Argument(help="A recipe whose answers stand, or the folder of a store.")],
    rows: Annotated[int, typer.Option(min=1, help="How many conversations.")] = 3,
    as_json: Json = False,
) -> None:
    """Show what is supervised, in colour, special tokens visible."""
    from itertools import islice

    from eyas.data import preview as p
    from eyas.recipe import read_recipe
    from eyas.run import Run
    from eyas.target import load_tokenizer, read_target

    if source.is_dir():
        tokenizer, found = load_tokenizer(read_target(_target_beside(source))), p.of_store(source)
    else:
        job = Run(read_recipe(source))
        tokenizer, found = job.template.tokenizer, iter(job.documents())
    if not as_json:
        p.preview(found, tokenizer, limit=rows)
        return
    names = ("text", "supervised", "special")
    shown = [
        {"id": d["id"], "category": d["category"]}
        | {"runs": [dict(zip(names, run, strict=True)) for run in p.runs(tokenizer, d)]}
        for d in islice(found, rows)
    ]
    show({"documents": shown})


@app.command()
def audit(
    recipe: Annotated[Path | None, typer.Option(help="A recipe whose store and vocabulary stand.")] = None,
    target: Annotated[str | None, typer.Option(help="A target, for an audit from its config alone.")] = None,
    draft_config: Annotated[Path | None, typer.Option(help="The draft's config.json.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="After training instead: latest, a step or a folder (with --recipe).")
    ] = None,
    as_json: Json = False,
) -> None:
    """What is frozen, where did it come from, GO or NO-GO; with --checkpoint, whether training kept to it."""
    from eyas import audit as a
    from eyas.target import read_target

    if checkpoint and not recipe:
        raise UsageError("eyas audit --checkpoint: give --recipe R, the recipe that it was trained with.")
    if recipe:
        from eyas import run as pipeline
        from eyas.files import read_json
        from eyas.recipe import read_recipe

        job = pipeline.Run(read_recipe(recipe))
        if checkpoint:
            found = pipeline.audit_checkpoint(job, checkpoint)
        else:
            with contextlib.suppress(pipeline.NoGo):  # shown below, with all its reasons
                pipeline.perform(job, pipeline.STAGES_BY_NAME["audit"])
            found = read_json(job.folder / "audit" / "audit.json")
    elif target:
        known = read_target(target)
        found = a.audit_config(known, a.config_for_audit(known, draft_config))
    else:
        raise UsageError(
            "eyas audit: give --recipe R, or --target T (with --draft-config C where the draft has its own shape)."
        )
    show(found) if as_json else console().print(a.table(found))
    raise typer.Exit(0 if found["verdict"] == "go" else 1)


@app.command()
def check(
    draft: Annotated[Path, typer.Argument(help="Folder of the draft.")],
    target: Annotated[str | None, typer.Option(help="Folder or hub name of its target.")] = None,
    engine: Annotated[str, typer.Option(help="sglang, vllm, llamacpp, openvino, trtllm or all.")] = "all",
    fix: Annotated[Path | None, typer.Option(help="Write a copy here with everything mended that is certain.")] = None,
    as_json: Json = False,
) -> None:
    """Will the engine fly it? The serving contract, engine by engine, before anything is deployed."""
    from eyas.serving.check import check as check_draft
    from eyas.target import read_target

    if not draft.is_dir():
        raise UsageError(f"{draft}: no such folder. Expected a draft: config.json and model.safetensors.")
    known = read_target(target) if target else None
    if fix:
        from eyas.serving.fix import fix as mend

        mended = mend(draft, fix, known)
        say(f"{fix}: written; changed: {mended.get('changed')}")
        draft = fix
    found = check_draft(draft, known, [engine])
    if as_json:
        show(found)
    else:
        _print_check(found)
    raise typer.Exit(1 if any(v["verdict"] == "error" for v in found["verdicts"].values()) else 0)


def _print_check(found: dict[str, Any]) -> None:
    out = console()
    colours = {"pass": "green", "warn": "yellow", "error": "red", "info": "dim"}
    for name, verdict in found["verdicts"].items():
        out.print(f"[bold]{name}[/bold]: [{colours[verdict['verdict']]}]{verdict['verdict']}[/]")
        for finding in verdict["findings"]:
            out.print(f"  [{colours[finding['severity']]}]{finding['rule']}[/] ", end="")
            out.print(finding["message"], markup=False)
            if finding["fix"]:
                out.print(f"    fix: {finding['fix']}", markup=False)


@store_app.command("info")
def store_info(path: StorePath, as_json: Json = False) -> None:
    """What a store holds."""
    from eyas.features import health as s

    found = s.info(path)
    show(found) if as_json else _print_pairs(found)


@store_app.command("verify")
def store_verify(
    path: StorePath,
    deep: Annotated[bool, typer.Option(help="Also finiteness, ranges, shapes and the self-check.")] = False,
    documents: Annotated[Path | None, typer.Option(help="The answers.jsonl that its tokens must agree with.")] = None,
    against: Annotated[str | None, typer.Option(help="A target: extract some samples anew and compare.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="How many samples --against extracts.")] = 8,
    as_json: Json = False,
) -> None:
    """Every checksum, at the speed of the disk; reads foreign folders (speculators, SpecForge, EAGLE) too."""
    from eyas.features import health as s

    rows = None
    if documents:
        from eyas.data.documents import read_documents

        rows = list(read_documents(documents))
    found = s.verify(path, deep=deep, documents=rows)
    if against:
        from eyas.features.extract import compare
        from eyas.target import load_target

        again = compare(path, load_target(against), sample)
        found["against"] = again
        found["bad"] += again["bad"]
        found["ok"] -= len(again["bad"])
    show(found) if as_json else _print_pairs(found)
    raise typer.Exit(1 if found["bad"] else 0)


@store_app.command("repair")
def store_repair(path: StorePath, as_json: Json = False) -> None:
    """Drop what is bad, never touch what is good; the next `eyas extract` fills the gaps."""
    from eyas.features import health as s

    found = s.repair(path)
    show(found) if as_json else _print_pairs(found)


@store_app.command("import")
def store_import(
    source: Annotated[Path, typer.Argument(help="Folder of hs_*.safetensors, .pt or .ckpt files.")],
    path: Annotated[str, typer.Argument(help="The new store, a folder or an address.")],
    target: Annotated[str, typer.Option(help="The target that they were extracted from.")],
    layers: Annotated[str, typer.Option(help="Its auxiliary layers as physical outputs, such as 1,14,26.")],
    documents: Annotated[
        Path | None, typer.Option(help="answers.jsonl, for the mask where the files have none.")
    ] = None,
    codec: Annotated[str, typer.Option(help="bf16, bf16z, int8o or fp8.")] = "bf16",
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Least share for the self-check.")] = 0.9,
    as_json: Json = False,
) -> None:
    """Bring a foreign folder of hidden states into a store; bad files are left out and named."""
    from eyas.data.documents import read_documents
    from eyas.features.foreign import import_
    from eyas.target import load_target

    try:
        wanted = sorted(int(layer) for layer in layers.split(","))
    except ValueError:
        raise UsageError(f"--layers {layers}: expected numbers with commas, such as 1,14,26.") from None
    rows = list(read_documents(documents)) if documents else None
    found = import_(source, path, load_target(target), layers=wanted, documents=rows, codec=codec, threshold=threshold)
    show(found) if as_json else _print_pairs(found)
    raise typer.Exit(1 if found["bad"] else 0)


def _print_pairs(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"{name}:", *value[0], sep="\t")
            for row in value:
                print("", *row.values(), sep="\t")
        else:
            print(f"{name}: {value}")


@app.command()
def replay(
    draft: Annotated[Path, typer.Argument(help="Folder of the draft.")],
    store: Annotated[str, typer.Option(help="A store of greedy on-policy conversations: a folder or an address.")],
    target: Annotated[str | None, typer.Option(help="Its target (default: the one beside the store).")] = None,
    k: Depth = None,
    tree: TreeShape = None,
    split: Annotated[str, typer.Option(help="heldout, train or all.")] = "heldout",
    engine: AsEngine = None,
    dtype: Annotated[str, typer.Option(help="Of the computation: bfloat16 or float32.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Exact greedy acceptance from the store; the target is not loaded."""
    import torch

    from eyas.data.split import load_split
    from eyas.decode.replay import replay as replay_store
    from eyas.decode.tree import Tree
    from eyas.features.store import Store
    from eyas.target import read_target

    _one_shape("replay", k, tree, dtype)
    states, known = Store(store), read_target(target or _target_beside(store))
    ids, data = list(states.ids), "all conversations of the store"
    if split != "all":
        parts, words = (
            load_split(Path(store).parent / "conversations" / "split.json"),
            {"heldout": "held-out", "train": "training"},
        )
        if split not in parts:
            raise UsageError(f"--split {split}: expected heldout, train or all.")
        have = set(ids)
        ids, data = [i for i in parts[split] if i in have], f"{words[split]} conversations"
    shape = Tree.parse(tree) if tree else k or 4
    _, found = replay_store(draft, known, states, shape, ids, data, engine, getattr(torch, dtype))
    if as_json:
        show(found)
        return
    for note in found["notes"]:
        say(note)
    _print_acceptance(found)


def _target_beside(store: str | Path) -> str:
    from eyas.recipe import read_recipe

    beside = Path(store).parent / "recipe.yaml"
    if not beside.exists():
        raise UsageError(f"{store}: no recipe.yaml beside it that names the target. Give --target.")
    return read_recipe(beside).target


def _one_shape(verb: str, k: int | None, tree: str | None, dtype: str) -> None:
    if k is not None and tree is not None:
        raise UsageError(f"eyas {verb}: give --k for a chain or --tree for a tree, not both.")
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype {dtype}: expected float32 or bfloat16.")


def _check_run(run: Path | None) -> None:
    if run and not (run / "recipe.yaml").exists():
        raise UsageError(f"--run {run}: no run folder (no recipe.yaml in it).")


def _into_run(run: Path | None, name: str, found: dict[str, Any]) -> None:
    """Keep figures in a run's folder, and show them in its report."""
    if run:
        from eyas.files import write_json
        from eyas.report.page import write_report

        (run / name).mkdir(exist_ok=True)
        write_json(run / name / f"{name}.json", found)
        say(f"{write_report(run)}: shows these figures now")


@app.command()
def decode(
    draft: Annotated[Path, typer.Argument(help="Folder of the draft.")],
    target: Annotated[str, typer.Option(help="Folder or hub name of its target.")],
    prompts: Annotated[Path, typer.Option(help="Prompts; of a run's own conversations.jsonl the held-out ones.")],
    k: Depth = None,
    tree: TreeShape = None,
    engine: AsEngine = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Decode the first prompts only.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 (texts are equal token for token) or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the draws, with a temperature.")] = 0,
    run: IntoRun = None,
    as_json: Json = False,
) -> None:
    """Real speculative decoding with the target, beside plain decoding in the same process, token for token."""
    _one_shape("decode", k, tree, dtype)
    _check_run(run)
    from eyas.data.prompts import read_prompts
    from eyas.decode import compare as c
    from eyas.decode.replay import read_draft
    from eyas.target import load_target, read_target

    propose = c.Tree.parse(tree) if tree else c.Chain(k or 4)
    known = read_target(target)
    (network, notes), asked = read_draft(draft, known, engine), read_prompts(prompts, limit, draft)
    loaded = load_target(known, dtype)
    settings: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    found = c.decode(network, loaded, asked, propose, engine=engine, **settings) | {"notes": notes}
    _into_run(run, "decode", found)
    if as_json:
        show(found)
        return
    _print_acceptance(found)
    time, share = found["round_ms"], found["share"]
    print(f"  speed-up ×{found['speedup']:.2f}: {_speeds(found)}")
    print(f"  a round: {time['draft']:.1f} ms drafting, {time['verify']:.1f} ms verifying; ", end="")
    print(f"plain decoding: {time['plain_token']:.1f} ms a token")
    print("  of the time: " + ", ".join(f"{name} {value:.0%}" for name, value in share.items()))
    if found["lossless"] is not None:
        same = found["protocol"]["prompts"] - len(found["differences"])
        print(f"  lossless: {same} of {found['protocol']['prompts']} texts equal plain decoding token for token")
    for each in found["differences"]:
        print(f"    {each['id']} parts at token {each['position']}, where the target's two logits differ by ", end="")
        print("nothing" if each["margin"] is None else f"{each['margin']:.2g}")


@app.command()
def measure(
    engine: Annotated[str, typer.Option(help="vllm, sglang or llamacpp.")],
    url: Annotated[str, typer.Option(help="Address of the server that speculates.")],
    prompts: Annotated[Path, typer.Option(help="Prompts; of a run's own conversations.jsonl the held-out ones.")],
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="What the server drafts in a round, to be checked.")
    ] = None,
    plain_url: Annotated[
        str | None, typer.Option(help="The same engine without speculation, for the speed-up.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The target's folder (default: what the server says).")] = None,
    draft: Annotated[Path | None, typer.Option(help="The draft's folder: which prompts was it trained on?")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Send the first prompts only.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    run: IntoRun = None,
    as_json: Json = False,
) -> None:
    """Acceptance and speed of a live server, from its own counters; set-ups that mislead are refused."""
    from eyas.measure import measure as measure_server

    _check_run(run)
    found = measure_server(
        engine,
        url,
        prompts,
        target=target,
        draft=draft,
        plain_url=plain_url,
        k=k,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        limit=limit,
        concurrency=concurrency,
    )
    _into_run(run, "measure", found)
    if as_json:
        show(found)
        return
    _print_acceptance(found)
    print(f"  speed: {_speeds(found)}" + (f"; ×{found['speedup']:.2f}" if found["speedup"] else ""))
    if found["lossless"] is not None:
        print(f"  {found['same_texts']} of {found['protocol']['prompts']} texts equal those of the plain server")
    for what in found["not_checked"]:
        print(f"  not checked: {what}")


def _print_acceptance(found: dict[str, Any]) -> None:
    from eyas.report.words import protocol_text

    low_high = " [{:.2f}, {:.2f}]".format(*found["interval"]) if "interval" in found else ""
    print(f"tau {found['tau']:.3f}{low_high} ({protocol_text(found['protocol'])})")
    if found["per_position"]:
        print("  per position: " + ", ".join(f"{share:.3f}" for share in found["per_position"]))
    for name, part in (found.get("by_category") or {}).items():
        print(f"  {name:<14} {part['tau']:.3f}  [{part['low']:.2f}, {part['high']:.2f}]  {part['rounds']} rounds")


def _speeds(found: dict[str, Any]) -> str:
    return ", ".join(f"{speed:,.1f} tokens/s {name}" for name, speed in found["tokens_per_s"].items())


@app.command()
def plan(
    store: Annotated[str, typer.Option(help="A store of greedy on-policy conversations: a folder or an address.")],
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")],
    target: Annotated[str | None, typer.Option(help="Its target (default: the one beside the store).")] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Times of other hardware (JSON) in place of this machine's.")
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="The deepest chain or tree to think of.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay this many conversations only.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the target, when times are measured here.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Expected speed per K and batch, chain and tree, and the flags for the best; says when speculation does not pay."""
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype {dtype}: expected float32 or bfloat16.")
    from eyas.decode import cost as c
    from eyas.decode.replay import read_draft
    from eyas.features.store import Store
    from eyas.target import load_target, read_target

    known = read_target(target or _target_beside(store))
    given = c.read_costs(costs) if costs else None
    (network, _), states = read_draft(draft, known), Store(store)
    ids, data = c.heldout_of(states)
    documents = c.ranks_in(states, network, k, ids[:limit])
    times = given or c.measure_costs(load_target(known, dtype), network)
    found = c.plan(documents, times, k, str(draft)) | {"data": data, "prompts": len(documents)}
    if as_json:
        show(found)
        return
    print(f"{times.device} ({times.note or 'given'}); {data}, {len(documents)} of them, greedy")
    for each in found["batches"]:
        print(each["verdict"])
        for engine, flags in (each["flags"] or {}).items():
            print(f"    {engine}: {flags}")


@app.command()
def canary(
    out: Annotated[Path, typer.Argument(help="Where the pair is written, or was.")],
    engine: Annotated[str, typer.Option(help="The engine that will serve it: its default layers are used.")],
    like: Annotated[
        Path | None, typer.Option(help="A target's config.json whose class the canary's target takes.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A server that holds the pair: ask it, and name the wire.")] = None,
    run: Annotated[str | None, typer.Option(help="Start this ('vllm serve') on the pair, ask it, stop it.")] = None,
    measured: Annotated[str | None, typer.Option(help="Or its acceptance per position, measured otherwise.")] = None,
    as_json: Json = False,
) -> None:
    """A tiny target and draft with a known acceptance: serve them, measure, and learn which wire is broken."""
    from eyas.files import read_json
    from eyas.serving import canary as c

    asked = url or run or measured
    if asked and (not run or (out / "canary.json").exists()):
        said = read_json(out / "canary.json")
    else:
        said = c.write(out, engine, read_json(like) if like else None)
    if asked:
        try:
            if run:
                with c.serving(said, run, out / "server.log") as url:
                    rates = c.ask(engine, url, said["prompt"])
            else:
                told = (measured or "").replace(",", " ").split()
                rates = [float(rate) for rate in told] or c.ask(engine, url or "", said["prompt"])
        except ValueError:
            raise UsageError(f"--measured {measured!r}: expected rates between 0 and 1, one per position.") from None
        wire, distance = c.diagnose(rates, said["layers"])
        said |= {"measured": rates, "wire": wire.name, "says": wire.says, "distance": distance}
    show(said) if as_json else _print_pairs({k: v for k, v in said.items() if k != "text"})
    raise typer.Exit(1 if said.get("wire", "right") != "right" else 0)


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Option(help="The run folder that the draft comes from.")] = None,
    draft: Annotated[Path | None, typer.Option(help="The draft that is served (default: the run's).")] = None,
    target: Annotated[str | None, typer.Option(help="The target that is served (default: the run's).")] = None,
    engine: Annotated[str | None, typer.Option(help="sglang, vllm, llamacpp, openvino or trtllm.")] = None,
    launch: Annotated[str | None, typer.Option(help="The server's launch line, in quotes.")] = None,
    log: Annotated[Path | None, typer.Option(help="The server's log.")] = None,
    measured: Annotated[Path | None, typer.Option(help="What `eyas measure --json` or decode printed.")] = None,
    url: Annotated[
        str | None, typer.Option(help="A live server, to measure now on the first 32 held-out conversations.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Why the figures disagree: ranked causes with evidence and the fix, and what was proved sound."""
    from eyas import doctor as d

    case = d.case_from(run, draft, target, engine, launch, log, measured)
    if url:
        case.measured = d.measure_now(case, url)
    found = d.examine(case)
    if as_json:
        show(found)
        return
    for cause in found["causes"]:
        print(f"{cause['confidence']}: {cause['cause']}")
        for line in cause["evidence"]:
            print(f"  {line}")
        print(f"  fix: {cause['fix']}")
    for line in found["checked"]:
        print(f"sound: {line}")


def main() -> None:
    """Errors become one sentence and an exit code: 2 wrong use, 1 failed; never a traceback."""
    try:
        app()
    except EyasError as error:
        print(f"eyas: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("eyas: interrupted; run the same command again to go on.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)

"""The command line: parse, call, print; nothing else. Heavy modules are imported by the command that needs them."""

import contextlib
import json
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
RecipePath = Annotated[Path, typer.Argument(help="The recipe (YAML).")]
Accept = Annotated[str | None, typer.Option(help="Go on after a NO-GO; the reason is recorded.")]


def show(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def console() -> Any:
    from rich.console import Console

    return Console()


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


def stage_command(verb: str, text: str) -> None:
    """One verb that runs one stage of a recipe, when the stages before it stand."""

    def command(recipe: RecipePath, accept: Accept = None, as_json: Json = False) -> None:
        from eyas import run as pipeline
        from eyas.recipe import read_recipe

        job = pipeline.Run(read_recipe(recipe), accept)
        stage = pipeline.STAGES_BY_NAME[pipeline.VERBS[verb]]
        fresh = pipeline.perform(job, stage)
        manifest = job.done[stage.name]
        if as_json:
            show({"stage": stage.name, "folder": str(job.folder / stage.name)} | manifest.figures)
        else:
            say(f"{stage.name}: {'done' if fresh else 'stands'}")
            for name, value in manifest.figures.items():
                print(f"{name}: {value}")

    app.command(verb, help=text)(command)


stage_command("prepare", "Read, clean and split the conversations of a recipe.")
stage_command("generate", "Let the target answer them: on-policy token ids and supervised spans.")
stage_command("extract", "Store the target's hidden states for these answers.")
stage_command("vocab", "Choose the draft vocabulary from the supervised tokens.")
stage_command("train", "Train the draft (training-time test), or go on with it.")
stage_command("export", "Write the trained draft for the engines.")


@app.command()
def init(
    target: Annotated[str, typer.Option(help="Hugging Face folder or hub name.")],
    conversations: Annotated[str, typer.Option(help="Prompts or conversations.")] = "examples/prompts.jsonl",
    out: Annotated[Path, typer.Option(help="Where to write the recipe.")] = Path("recipe.yaml"),
) -> None:
    """Write a commented recipe for a target, with estimates of disk and tokens."""
    from eyas.files import write_text
    from eyas.initial import initial_recipe

    if out.exists():
        raise UsageError(f"{out}: exists already. Name another file with --out, or remove it.")
    write_text(out, initial_recipe(target, conversations))
    print(f"{out}: written. Read it, then: eyas run {out}")


@app.command()
def preview(
    recipe: RecipePath,
    rows: Annotated[int, typer.Option(min=1, help="How many conversations.")] = 3,
) -> None:
    """Show what is supervised, in colour, special tokens visible."""
    from itertools import islice

    from eyas.data.preview import preview as show_preview
    from eyas.recipe import read_recipe
    from eyas.run import Run

    job = Run(read_recipe(recipe))
    show_preview(islice(job.documents(), rows), job.template.tokenizer, limit=rows)


@app.command()
def audit(
    recipe: Annotated[Path | None, typer.Option(help="A recipe whose store and vocabulary stand.")] = None,
    target: Annotated[str | None, typer.Option(help="A target, for an audit from its config alone.")] = None,
    draft_config: Annotated[Path | None, typer.Option(help="The draft's config.json.")] = None,
    as_json: Json = False,
) -> None:
    """Before training: what is frozen, where did it come from, GO or NO-GO."""
    from eyas import audit as a
    from eyas.target import read_target

    if recipe:
        from eyas import run as pipeline
        from eyas.files import read_json
        from eyas.recipe import read_recipe

        job = pipeline.Run(read_recipe(recipe))
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
def store_info(path: Path, as_json: Json = False) -> None:
    """What a store holds."""
    from eyas.features import health as s

    found = s.info(path)
    show(found) if as_json else _print_pairs(found)


@store_app.command("verify")
def store_verify(
    path: Path,
    deep: Annotated[bool, typer.Option(help="Also finiteness, ranges, shapes and the self-check.")] = False,
    as_json: Json = False,
) -> None:
    """Every checksum, at the speed of the disk."""
    from eyas.features import health as s

    found = s.verify(path, deep=deep)
    show(found) if as_json else _print_pairs(found)
    raise typer.Exit(1 if found["bad"] else 0)


@store_app.command("repair")
def store_repair(path: Path, as_json: Json = False) -> None:
    """Drop what is bad, never touch what is good; the next `eyas extract` fills the gaps."""
    from eyas.features import health as s

    found = s.repair(path)
    show(found) if as_json else _print_pairs(found)


def _print_pairs(found: dict[str, Any]) -> None:
    for name, value in found.items():
        print(f"{name}: {value}")


@app.command()
def replay(
    draft: Annotated[Path, typer.Argument(help="Folder of the draft.")],
    store: Annotated[Path, typer.Option(help="A store of greedy on-policy conversations.")],
    target: Annotated[str | None, typer.Option(help="Its target (default: the one beside the store).")] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Tokens drafted in a round.")] = 4,
    split: Annotated[str, typer.Option(help="heldout, train or all.")] = "heldout",
    as_json: Json = False,
) -> None:
    """Exact greedy acceptance from the store; the target is not loaded."""
    from eyas.features.store import Store
    from eyas.recipe import read_recipe
    from eyas.report.words import protocol_text
    from eyas.run import replay_draft
    from eyas.target import read_target

    states = Store(store)
    beside = store.parent / "recipe.yaml"
    if target is None:
        if not beside.exists():
            raise UsageError(f"{store}: no recipe.yaml beside it that names the target. Give --target.")
        target = read_recipe(beside).target
    ids, data = list(states.ids), "all conversations of the store"
    if split != "all":
        from eyas.data.split import load_split

        parts = load_split(store.parent / "conversations" / "split.json")
        if split not in parts:
            raise UsageError(f"--split {split}: expected heldout, train or all.")
        have = set(ids)
        ids, data = (
            [i for i in parts[split] if i in have],
            {"heldout": "held-out conversations", "train": "training conversations"}[split],
        )
    _, found = replay_draft(draft, read_target(target), states, k, ids, data)
    if as_json:
        show(found)
        return
    print(f"tau {found['tau']:.3f} ({protocol_text(found['protocol'])})")
    for name, part in found["by_category"].items():
        print(f"  {name:<14} {part['tau']:.3f}  [{part['low']:.2f}, {part['high']:.2f}]  {part['rounds']} rounds")


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

"""Writes docs/doctor.md: each broken case of test_doctor, and what the doctor says of it (`make doctor-table`)."""

import tempfile
from pathlib import Path

from conftest import ROOT, save_tiny_target
from test_doctor import BESIDES, CASES, Broken, run

HEAD = """# What the doctor says of drafts that were broken on purpose

Each row is a real draft of a tiny target, trained by `eyas run`, then broken in one way (`tests/test_doctor.py`), served
as SGLang, vLLM or OpenVINO would load it. *Others called certain* has to be empty: no case may be misnamed as certain.
What is true of all these runs besides is left out: few conversations, and a file that is not the run's export any more.
`make doctor-table` writes this page anew.

| broken | named first | confidence | others, likely or possible | others called certain |
|---|---|---|---|---|
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        target = save_tiny_target(folder / "target")
        (folder / "run").mkdir()
        trained = run(folder / "run", target)
        rows, right = [], 0
        for breaking, wanted in {**CASES, sound: "nothing"}.items():
            (folder / breaking.__name__).mkdir()
            broken = Broken(trained, folder / breaking.__name__, target)
            breaking(broken)
            causes = [(c["cause"], c["confidence"]) for c in broken.examined()["causes"] if c["cause"] not in BESIDES]
            first, *others = causes or [("nothing", "")]
            right += first[0] == wanted
            weak = ", ".join(sorted({cause for cause, how in others if how != "certain" and cause != first[0]}))
            strong = ", ".join(sorted({cause for cause, how in others if how == "certain" and cause != first[0]}))
            name = breaking.__name__.replace("_", " ")
            rows.append(f"| {name} (wanted: {wanted}) | {first[0]} | {first[1]} | {weak} | {strong} |\n")
    (ROOT / "docs" / "doctor.md").write_text(
        HEAD + "".join(rows) + f"\n{right} of {len(rows)} named first as wanted.\n"
    )


def sound(_: Broken) -> None:
    """Nothing is broken."""


if __name__ == "__main__":
    main()

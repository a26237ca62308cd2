"""Parts of the feature room's tests: samples that look like a target's states, and processes to kill."""

import numpy as np

from eyas.features.codec import to_bits
from eyas.features.store import Sample, teacher_positions

LAYERS, WIDTH = [1, 3, 6], 64
STORE = {"layers": LAYERS, "hidden_size": WIDTH, "target": {"weights": "w", "chat_template": "c"}}
FIELDS = ("tokens", "supervised", "aux", "final", "argmax")


def make_sample(number: int, length: int | None = None, turns: int = 2) -> Sample:
    """A sample that follows from its number alone: normal states with a few channels hundreds of times larger."""
    random = np.random.default_rng(number)
    length = length or int(random.integers(20, 90))
    edges = np.sort(random.choice(np.arange(1, length), 2 * turns, replace=False))
    supervised = np.zeros(length, bool)
    for start, end in edges.reshape(-1, 2):
        supervised[start:end] = True
    supervised[-1] = True
    tokens = random.integers(0, 300, length).astype(np.int32)
    at = teacher_positions(supervised)
    scale = np.where(np.arange(WIDTH) % 31 == 5, 400, random.uniform(0.1, 3, WIDTH))
    argmax = tokens[at + 1].copy()
    argmax[::13] = (argmax[::13] + 1) % 300
    return Sample(
        id=f"c{number:03d}",
        category="maths" if number % 2 else "writing",
        tokens=tokens,
        supervised=supervised,
        aux=to_bits(random.standard_normal((length, len(LAYERS), WIDTH)) * scale),
        final=to_bits(random.standard_normal((len(at), WIDTH)) * scale),
        argmax=argmax,
    )


def same(a: Sample, b: Sample) -> bool:
    """Bit for bit, types included."""
    return (a.id, a.category) == (b.id, b.category) and all(
        getattr(a, name).dtype == getattr(b, name).dtype and np.array_equal(getattr(a, name), getattr(b, name))
        for name in FIELDS
    )

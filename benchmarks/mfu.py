"""How much of this machine's bf16 matmul rate a training step of eyas reaches, and where the rest goes.

    .venv/bin/python benchmarks/mfu.py [--shape smollm2] [--tokens 2048] [--steps 7] [--half] [--trained] [--profile]

The rate counts only work that has to be done. For every row of every step that runs: the layer's and head's products
forward, their gradients for inputs, and for weights that are trained; attention's two products over the keys that a row
may see, and four in the backward pass (the scores made again there are not counted). Once: fc (no gradient for its
inputs), keys and values of prompt rows, what q, k and v take from embeddings, the teacher's logits. Everything else
(norms, softmax, casts, loss, clipping, AdamW) counts as nothing but takes its time. The peak is the best of some bf16 products of torch in the same process.
With OMP_NUM_THREADS=1 the clock counts CPU seconds, so that a busy machine does not matter.
"""

import argparse
import time
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, profile
from train_step import SHAPES, eyas

CLOCK = time.process_time if torch.get_num_threads() == 1 else time.monotonic


def peak(seconds=2.0):
    """The best bf16 matmul rate in FLOP/s over square and wide products."""
    best = 0.0
    for n, k, m in ((2048, 2048, 2048), (1024, 4096, 4096), (512, 576, 8192)):
        a, b = torch.randn(n, k).bfloat16(), torch.randn(k, m).bfloat16()
        until = CLOCK() + seconds
        while CLOCK() < until:
            start = CLOCK()
            a @ b
            best = max(best, 2 * n * k * m / (CLOCK() - start))
    return best


def needed(s, rows, steps, half, trained):
    """FLOPs of one step, by what they are for."""
    first = rows // 2 if half else 0  # rows from here on are chains; step k runs all but the last k of them
    queries, key_value = s.heads * s.dim, s.kv * s.dim
    later = s.hidden * (queries + 2 * key_value) + queries * s.hidden + 3 * s.hidden * s.inner
    once = s.hidden * ((rows - first) * queries + rows * 2 * key_value)  # the embeddings' half, the same at every step
    chains = [rows - first - k for k in range(steps)]
    seen = sum(sum(range(first + 1, first + n + 1)) + k * n for k, n in enumerate(chains))
    return {
        "fc": 2 * 2 * rows * 3 * s.hidden * s.hidden,
        "layer": 3 * 2 * (sum(chains) * later + first * s.hidden * 2 * key_value + once),
        "attention": (2 + 4) * 2 * queries * seen,
        "head": (3 if trained else 2) * 2 * sum(chains) * s.hidden * s.draft,
        "teacher": 2 * (rows - first) * s.hidden * s.draft,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--half", action="store_true", help="the first half of the document is prompt")
    parser.add_argument("--trained", action="store_true", help="train the head too")
    parser.add_argument("--profile", action="store_true", help="a table of where the time goes")
    options = parser.parse_args()
    s = SimpleNamespace(**SHAPES[options.shape])
    case = (s, options.tokens, options.steps, options.half, options.trained)
    work = needed(*case)
    step, rate = eyas(*case), peak()
    step()
    seconds = []
    for _ in range(3):
        start = CLOCK()
        step()
        seconds.append(CLOCK() - start)
    best, total = min(seconds), sum(work.values())
    print(f"{options.shape}, T = {options.tokens}, K = {options.steps}, head {'trained' if options.trained else 'frozen'}, "
          f"{'half prompt' if options.half else 'everything supervised'}, {torch.get_num_threads()} threads")  # fmt: skip
    print("needed GFLOP: " + ", ".join(f"{name} {value / 1e9:.0f}" for name, value in work.items()))
    print(f"step {best:.2f} s ({options.tokens / best:.0f} tokens/s), {total / best / 1e9:.0f} of {rate / 1e9:.0f} GFLOP/s: "
          f"MFU {total / best / rate:.2f}")  # fmt: skip
    if options.profile:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            step()
        rows = sorted(found.key_averages(), key=lambda e: -e.self_cpu_time_total)
        whole = sum(e.self_cpu_time_total for e in rows)
        print("| operation | calls | share of time |\n|---|--:|--:|")
        for e in rows[:16]:
            print(f"| {e.key.removeprefix('aten::')} | {e.count:,} | {e.self_cpu_time_total / whole:.1%} |")


if __name__ == "__main__":
    main()

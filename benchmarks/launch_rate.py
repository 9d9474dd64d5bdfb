"""Launch rate of code outside regions: KREX loaded and a coordinator running, over without (0.99-1.01).

In a real ipykernel the same loop runs many times, in random order: with the extension loaded and the process
known to a coordinator, and with the extension unloaded, twice. The second one without is the control: what it
differs by from the first is what this machine makes of nothing at all. One process for all three, because two
processes of the same program differ by several percent on their own; fresh kernels for each group, so that no
single one counts for all.

    python benchmarks/launch_rate.py [--device cpu|cuda:0] [--groups 5] [--rounds 20] [--json]

On the cpu a launch is a call of a compiled Numba function that does next to nothing; on a GPU it is a CuPy
launch of an empty kernel, synchronised every 1,000.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from statistics import fmean, median

from krex_jupyter.bench.kernels import Kernel
from krex_jupyter.bench.machine import machine
from krex_jupyter.bench.private import PrivateCoordinator, private_coordinator

CPU_LOOP = """
import statistics
import time
import numba

@numba.njit(numba.float64(numba.float64))
def launch(x):
    return x + 1.0

def once(count=20_000):
    started = time.perf_counter()
    for _ in range(count):
        launch(1.0)
    return count / (time.perf_counter() - started)

def rate():
    return statistics.median(once() for _ in range(40))  # short loops: somebody else's slice spoils few of them

rate()
"""
CUDA_LOOP = """
import statistics
import time
import cupy

kernel = cupy.RawKernel('extern "C" __global__ void nothing() { }', 'nothing')
stream = cupy.cuda.get_current_stream()

def once(count=1_000):
    started = time.perf_counter()
    for _ in range(count):
        kernel((1,), (1,), ())
    stream.synchronize()
    return count / (time.perf_counter() - started)

def rate():
    return statistics.median(once() for _ in range(40))

rate()
"""
NAMES = ("with", "without", "control")


def main() -> int:
    """Measure and print; 1 if the target is certainly missed, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", help="cpu or cuda:N (default: the first GPU, else cpu)")
    parser.add_argument("--groups", type=int, default=5, help="times that fresh kernels are started")
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each kernel")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    started_at = time.time()
    ratios: list[float] = []
    controls: list[float] = []
    with private_coordinator() as coordinator:
        gpu = any(device.vendor == "nvidia" for device in coordinator.devices)
        device = args.device or ("cuda:0" if gpu else "cpu")
        for group in range(args.groups):
            ratio, control = measure_group(coordinator, device, args.rounds, seed=group)
            ratios.append(ratio)
            controls.append(control)
            print(f"group {group + 1}: {ratio:.4f}  control {control:.4f}", file=sys.stderr, flush=True)
    low, high = interval(ratios)
    verdict = judge(low, high)
    row = {
        "device": device,
        "ratio": fmean(ratios),
        "ratio_ci95": (low, high),
        "target": verdict,
        "control": fmean(controls),
        "control_ci95": interval(controls),
        "groups": ratios,
        "controls": controls,
    }
    document = {
        "version": 1,
        "command": "launch-rate",
        "started_at": started_at,
        "machine": machine(),
        "device": {"id": device},
        "rows": [row],
    }
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        print(
            f"{device}: with KREX ÷ without {row['ratio']:.4f} [{low:.4f}, {high:.4f}], "
            f"control {row['control']:.4f}; target 0.99-1.01: {verdict}"
        )
    return 1 if verdict == "not met" else 0


def measure_group(
    coordinator: PrivateCoordinator, device: str, rounds: int, seed: int
) -> tuple[float, float]:
    """Rate with KREX over without, and without over without, in one fresh kernel: medians over rounds."""
    order = random.Random(seed)
    ratios: list[float] = []
    controls: list[float] = []
    with Kernel.start(coordinator.directory, str(seed), coordinator.environment) as kernel:
        kernel.ready()
        kernel.run(CPU_LOOP if device == "cpu" else CUDA_LOOP)
        for _ in range(rounds):
            rates: dict[str, float] = {}
            for name in order.sample(NAMES, len(NAMES)):
                if name == "with":
                    kernel.run("%load_ext krex_jupyter")
                    coordinator.wait_for([kernel.pid])
                rates[name] = float(kernel.run("print(rate())"))
                if name == "with":
                    kernel.run("%unload_ext krex_jupyter")
            ratios.append(rates["with"] / rates["without"])
            controls.append(rates["control"] / rates["without"])
    return median(ratios), median(controls)


def judge(low: float, high: float) -> str:
    """What the interval of the ratio says about the target."""
    if low >= 0.99 and high <= 1.01:
        return "met"
    return "not met" if high < 0.99 or low > 1.01 else "undecided, this machine was too noisy"


def interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the mean over groups (Student's t); all numbers for fewer than two groups."""
    if len(values) < 2:
        return -math.inf, math.inf
    quantile = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
    mean = fmean(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = quantile.get(len(values) - 1, 2.0) * deviation / math.sqrt(len(values))
    return mean - half, mean + half


if __name__ == "__main__":
    sys.exit(main())

"""What the tuning agents of the demo try: a fixed set of kernels, some of them wrong. Pure.

Fixed, so that nobody can make it easy afterwards: every task has variants far apart and variants that are the
same work written differently (ties, which are hard to rank), and a few variants that compute something else
and must be caught by the check. What differs from run to run is only a nonce in the source, so that no
compiler or driver finds the result in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Family: TypeAlias = Literal["matmul", "stencil", "reduction"]
Language: TypeAlias = Literal["numba", "cuda"]


@dataclass(frozen=True)
class Variant:
    """One entry of the set: what to compute (``family``, ``size``) and how (the rest)."""

    family: Family
    size: int
    tile: int
    unroll: int
    depth: int = 1
    """Tiles that the compiler unrolls; this makes it take its time, as kernels that people tune do."""
    wrong: bool = False
    """It leaves out part of the work: faster than the honest ones, and not correct."""

    @property
    def task(self) -> str:
        """Variants of one task are ranked against each other."""
        return f"{self.family}-{self.size}"

    @property
    def name(self) -> str:
        """Unique within the set."""
        depth = f"-depth{self.depth}" if self.depth > 1 else ""
        return f"{self.task}/tile{self.tile}-unroll{self.unroll}{depth}{'-wrong' if self.wrong else ''}"


@dataclass(frozen=True)
class Candidate:
    """A variant written down: what an agent sends to its kernel."""

    variant: Variant
    entry: str
    """Name of the function in ``source``; it carries the nonce."""
    source: str
    grid: tuple[int, ...] = field(default=())
    block: tuple[int, ...] = field(default=())

    def payload(self) -> dict[str, object]:
        """As the notebooks of `examples/` read it."""
        return {
            "name": self.variant.name,
            "family": self.variant.family,
            "size": self.variant.size,
            "entry": self.entry,
            "source": self.source,
            "grid": list(self.grid),
            "block": list(self.block),
        }


_NUMBA_SET = (
    *(Variant("matmul", 64, tile, unroll) for tile, unroll in ((16, 1), (16, 2), (32, 4), (64, 4), (64, 8))),
    *(Variant("matmul", 192, tile, unroll) for tile, unroll in ((16, 1), (16, 4), (32, 4), (64, 4), (64, 8))),
    *(
        Variant("stencil", 514, tile, unroll)
        for tile, unroll in ((16, 1), (32, 1), (128, 1), (16, 4), (16, 8))
    ),
    *(Variant("reduction", 1 << 20, 0, unroll) for unroll in (1, 2, 4, 8, 16)),
    *(Variant("stencil", 1026, tile, unroll) for tile, unroll in ((16, 1), (32, 1), (128, 1), (64, 4))),
    Variant("matmul", 64, 32, 2, wrong=True),
    Variant("matmul", 192, 32, 2, wrong=True),
    Variant("stencil", 514, 64, 2, wrong=True),
    Variant("reduction", 1 << 20, 0, 3, wrong=True),
)

_CUDA_SHAPES = ((16, 1, 32), (16, 2, 32), (16, 4, 16), (16, 4, 32), (32, 2, 16), (32, 2, 32))
_CUDA_SET = (
    *(Variant("matmul", 512, tile, unroll, depth) for tile, unroll, depth in _CUDA_SHAPES),
    *(Variant("matmul", 1024, tile, unroll, depth) for tile, unroll, depth in _CUDA_SHAPES),
    *(Variant("matmul", 2048, tile, unroll, depth) for tile, unroll, depth in _CUDA_SHAPES),
    *(Variant("matmul", 4096, tile, unroll, depth) for tile, unroll, depth in _CUDA_SHAPES[1:4]),
    *(Variant("stencil", 4096, tile, unroll) for tile, unroll in ((8, 1), (16, 1), (32, 1))),
    Variant("matmul", 512, 32, 1, 16, wrong=True),
    Variant("matmul", 1024, 32, 1, 16, wrong=True),
    Variant("matmul", 2048, 32, 1, 16, wrong=True),
    Variant("stencil", 4096, 8, 2, wrong=True),
)


def variants(language: Language) -> tuple[Variant, ...]:
    """The fixed set of a language."""
    return _NUMBA_SET if language == "numba" else _CUDA_SET


def chosen(language: Language, count: int | None) -> tuple[Variant, ...]:
    """``count`` variants of the set, spread over its tasks and with its share of wrong ones; None is all."""
    whole = variants(language)
    if count is None or count >= len(whole):
        return whole
    by_task: dict[str, list[Variant]] = {}
    for variant in whole:
        by_task.setdefault(variant.task, []).append(variant)
    wrong = [variant for variant in whole if variant.wrong]
    taken = wrong[: max(1, round(count * len(wrong) / len(whole)))]
    while len(taken) < count:
        for members in by_task.values():
            rest = [variant for variant in members if not variant.wrong and variant not in taken]
            if rest and len(taken) < count:
                taken.append(rest[0])
        if not any(variant not in taken and not variant.wrong for variant in whole):
            break
    return tuple(variant for variant in whole if variant in taken)


def write(variant: Variant, language: Language, nonce: str) -> Candidate:
    """The source of ``variant``; ``nonce`` (letters, digits) makes it one that nobody has compiled before."""
    entry = f"{variant.family}_{nonce}"
    if language == "numba":
        return Candidate(variant, entry, _NUMBA_WRITERS[variant.family](variant, entry))
    return _CUDA_WRITERS[variant.family](variant, entry)


# --- Numba: one thread on the cpu device --------------------------------------------------------------------


def _numba_matmul(variant: Variant, entry: str) -> str:
    tile, unroll = variant.tile, variant.unroll
    body = "\n".join(
        f"                            c[i, j + {step}] += factor * b[k, j + {step}]" for step in range(unroll)
    )
    last = " - 1" if variant.wrong else ""
    return f"""\
def {entry}(a, b, c):
    n = a.shape[0]
    for i in range(n):
        for j in range(n):
            c[i, j] = 0.0
    for tile_i in range(0, n, {tile}):
        for tile_k in range(0, n, {tile}):
            for tile_j in range(0, n, {tile}):
                for i in range(tile_i, min(tile_i + {tile}, n)):
                    for k in range(tile_k, min(tile_k + {tile}, n){last}):
                        factor = a[i, k]
                        for j in range(tile_j, min(tile_j + {tile}, n), {unroll}):
{body}
"""


def _numba_stencil(variant: Variant, entry: str) -> str:
    tile, unroll = variant.tile, variant.unroll
    body = "\n".join(
        f"                    c[i, j + {step}] = 0.25 * (a[i - 1, j + {step}] + a[i + 1, j + {step}]"
        f" + a[i, j - 1 + {step}] + {'b' if variant.wrong else 'a'}[i, j + 1 + {step}])"
        for step in range(unroll)
    )
    return f"""\
def {entry}(a, b, c):
    n = a.shape[0]
    for sweep in range(3):
        for tile_i in range(1, n - 1, {tile}):
            for i in range(tile_i, min(tile_i + {tile}, n - 1)):
                for j in range(1, n - 1, {unroll}):
{body}
"""


def _numba_reduction(variant: Variant, entry: str) -> str:
    unroll = variant.unroll
    start = "\n".join(f"    sum_{step} = 0.0" for step in range(unroll))
    body = "\n".join(f"        sum_{step} += a[i + {step}] * b[i + {step}]" for step in range(unroll))
    end = "n - n % 3 - 3" if variant.wrong else "n"
    return f"""\
def {entry}(a, b, c):
    n = a.shape[0]
{start}
    for i in range(0, {end}, {unroll}):
{body}
    c[0] = {" + ".join(f"sum_{step}" for step in range(unroll))}
"""


_NUMBA_WRITERS = {"matmul": _numba_matmul, "stencil": _numba_stencil, "reduction": _numba_reduction}


# --- CUDA C++: compiled by NVRTC ----------------------------------------------------------------------------


def _cuda_matmul(variant: Variant, entry: str) -> Candidate:
    size, tile, unroll = variant.size, variant.tile, variant.unroll
    height = tile * unroll
    last = " - 1" if variant.wrong else ""
    source = f"""\
extern "C" __global__ void {entry}(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c)
{{
    const int n = {size};
    __shared__ float part_a[{height}][{tile} + 1];
    __shared__ float part_b[{tile}][{tile}];
    const int column = blockIdx.x * {tile} + threadIdx.x;
    const int row = blockIdx.y * {height} + threadIdx.y;
    float sum[{unroll}] = {{}};
    #pragma unroll {variant.depth}
    for (int start = 0; start < n; start += {tile}) {{
        #pragma unroll
        for (int u = 0; u < {unroll}; ++u)
            part_a[threadIdx.y + u * {tile}][threadIdx.x] = a[(row + u * {tile}) * n + start + threadIdx.x];
        part_b[threadIdx.y][threadIdx.x] = b[(start + threadIdx.y) * n + column];
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < {tile}{last}; ++k) {{
            #pragma unroll
            for (int u = 0; u < {unroll}; ++u)
                sum[u] += part_a[threadIdx.y + u * {tile}][k] * part_b[k][threadIdx.x];
        }}
        __syncthreads();
    }}
    #pragma unroll
    for (int u = 0; u < {unroll}; ++u)
        c[(row + u * {tile}) * n + column] = sum[u];
}}
"""
    return Candidate(variant, entry, source, grid=(size // tile, size // height), block=(tile, tile))


def _cuda_stencil(variant: Variant, entry: str) -> Candidate:
    size, tile, unroll = variant.size, variant.tile, variant.unroll
    height = tile * unroll
    right = "b" if variant.wrong else "a"
    source = f"""\
extern "C" __global__ void {entry}(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c)
{{
    const int n = {size};
    const int j = blockIdx.x * {tile} + threadIdx.x;
    #pragma unroll
    for (int u = 0; u < {unroll}; ++u) {{
        const int i = blockIdx.y * {height} + u * {tile} + threadIdx.y;
        if (i > 0 && i < n - 1 && j > 0 && j < n - 1)
            c[i * n + j] = 0.25f * (a[(i - 1) * n + j] + a[(i + 1) * n + j]
                                    + a[i * n + j - 1] + {right}[i * n + j + 1]);
    }}
}}
"""
    return Candidate(variant, entry, source, grid=(size // tile, size // height), block=(tile, tile))


def _cuda_reduction(variant: Variant, entry: str) -> Candidate:
    raise ValueError(f"the CUDA set has no reduction ({variant.name}, {entry})")


_CUDA_WRITERS = {"matmul": _cuda_matmul, "stencil": _cuda_stencil, "reduction": _cuda_reduction}

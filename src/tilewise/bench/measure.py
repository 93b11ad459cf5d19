"""One workload at one number of threads: everybody in turn, round by round, and what came of it as plain data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilewise.arguments import F32Array
from tilewise.bench import machine
from tilewise.bench.ours import OURS
from tilewise.bench.peers import Peer, Ready
from tilewise.bench.runner import Local, Opened, PeerFailed, Runner, one_line
from tilewise.bench.workloads import Workload, inputs
from tilewise.reference import attention64
from tilewise.runtime.roof import READ_AHEAD, RoofProbe
from tilewise.simd.target import Target, find_target
from tilewise.verify.halves import wide

# Between two results on standard normal inputs, which lie below 4 but for the first rows, that are exact. A wrong mask
# gives 0.01 and more in float32. In half types, which some also round their weights to, it is some units in the last
# place of numbers from 2 to 4, and masks rely on the check in float32.
LARGEST_ERROR = {"f32": 2e-5, "f16": 2**-7, "bf16": 2**-5}
DIGITS = {"f16": 11, "bf16": 8}  # of a half type, the leading one included
FEWEST_ROUNDS, MOST_ROUNDS = 9, 200
SLOW, SLOW_ROUNDS = 4, 3  # who takes so many times longer than the fastest takes part in so few rounds
ROOF = "roof"
REST = 0.005  # seconds; the threads of some libraries spin for a while after a call
Step = Callable[[float, str], None]  # (fraction done, what comes now)


@dataclass(frozen=True)
class Settings:
    seconds: float = 10.0  # of timing a workload
    repeat: int | None = None  # rounds; None: as many as fit
    burst: float = 0.02  # seconds of calls in a row, one call at least: keys that fit a cache lie there, for all alike
    fewest: int = FEWEST_ROUNDS
    slow_rounds: int = SLOW_ROUNDS

    def changed(self, seconds: float | None, repeat: int | None) -> Settings:
        """With what a user chose instead."""
        return replace(self, seconds=seconds or self.seconds, repeat=repeat or self.repeat)


@dataclass(eq=False)
class Contender:
    peer: str
    variant: str
    runner: Runner
    opened: Opened
    error: float = 0.0
    failed: str = ""
    bursts: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """One figure a round: the median of its burst."""
        return [statistics.median(times) for times in self.bursts]

    @property
    def typical(self) -> float:
        return self.opened.typical_seconds

    def sample(self, seconds: float) -> None:
        if not self.failed:
            try:
                self.bursts.append(self.runner.sample(self.variant, seconds))
            except (Exception, SystemExit) as error:
                self.failed = str(error) if isinstance(error, PeerFailed) else one_line(error)


@dataclass(eq=False)
class Side:
    """Ours on a workload, with the roof of its threads and target."""

    w: Workload
    threads: int
    target: Target
    ours: Contender
    probe: RoofProbe | None
    roof: list[Contender]

    def roof_of(self, other: Side) -> bool:
        """Whether the roof of the other one is this one's."""
        return (self.threads, self.target, self.w.kv_bytes) == (other.threads, other.target, other.w.kv_bytes)

    def record(self) -> dict[str, Any]:
        w = self.w
        return {
            "workload": w.name, "title": w.title, "shape": w.shape, "type": w.type, "threads": self.threads,
            "target": self.target.name, "flops": w.flops, "kv_bytes": w.kv_bytes, "out_bytes": w.out_bytes,
            "tiny": w.tiny, "roof": roof_record(self.probe, self.roof), "ours": record(self.ours),
        }  # fmt: skip


def open_side(w: Workload, threads: int, target: Target) -> tuple[Side, F32Array]:
    """Ours on a workload, and its result."""
    threads, target = w.threads or threads, find_target(w.target) if w.target else target
    runner = Local(OURS, threads, target.name)
    opened = runner.open(w, "attention")
    if opened.result is None:
        raise RuntimeError(f"{w.name}: tilewise itself failed: {opened.reason}")
    ours = Contender(OURS.name, "attention", runner, opened, spot_error(w, opened.result))
    return Side(w, threads, target, ours, None, []), opened.result


def add_roof(side: Side, other: Side | None) -> list[Contender]:
    """Give a side its roof, the other one's where it is the same; who joins the rounds for it."""
    if side.w.tiny:
        return []
    if other and other.probe and side.roof_of(other):
        side.probe, side.roof = other.probe, other.roof
        return []
    side.probe = RoofProbe(side.target, side.w.kv_bytes, side.threads)
    side.roof = roof_contenders(side.probe, side.threads)
    return side.roof


def measure(
    w: Workload, threads: int, target: Target, peers: Sequence[tuple[Peer, Runner]], settings: Settings, step: Step
) -> dict[str, Any]:
    """Check every peer against our result, then time them in turn with ours and the roof; see benchmarks/README.md."""
    step(0.0, "tilewise")
    peers = [] if w.alone else peers
    side, expected = open_side(w, threads, target)
    beside = open_side(w.beside, threads, target)[0] if w.beside else None
    everybody = [*add_roof(side, None), side.ours]
    if beside:
        everybody += [*add_roof(beside, side), beside.ours]
    rivals, skipped = open_peers(w, peers, expected, step)
    everybody += rivals
    runners = {id(x): x for x in (*(c.runner for c in everybody), *(runner for _, runner in peers))}.values()
    try:
        rounds, due = schedule(everybody, rivals, settings)
        wall, busy = time_rounds(everybody, due, rounds, side.threads, settings, step)
    finally:
        for runner in runners:
            runner.release()
    skipped += [_skip(x, x.failed) for x in rivals if x.failed]
    return side.record() | {
        "beside": beside.record() if beside else None, "rounds": rounds, "wall_seconds": round(wall, 2), "busy": busy,
        "peers": [record(x) for x in rivals if not x.failed], "skipped": skipped,
    }  # fmt: skip


def time_rounds(
    everybody: Sequence[Contender], due: Sequence[set[int]], rounds: int, threads: int, settings: Settings, step: Step
) -> tuple[float, dict[str, Any]]:
    """All in turn, round by round: (seconds that it took, how busy the machine was)."""
    pids = sorted({pid for x in everybody for pid in x.runner.pids})
    before = machine.usage(pids)
    begin = time.perf_counter()
    for round_ in range(rounds):
        for contender, times in zip(everybody, due, strict=True):
            if round_ in times:
                step(0.3 + 0.7 * round_ / rounds, f"{contender.peer} {contender.variant}")
                if threads > 1 or pids:
                    time.sleep(REST)
                contender.sample(settings.burst)
    return time.perf_counter() - begin, machine.disturbance(before, machine.usage(pids))


def roof_contenders(probe: RoofProbe, threads: int) -> list[Contender]:
    """The kernels of the roof: fma, alone and in a crowd, products, and both ways to read as many bytes as the
    workload's keys and values."""
    calls: dict[str, Callable[[], None]] = {"fma": probe.fma, "crowded": probe.crowded, "product": probe.product}
    calls |= {f"read ahead {ahead}": _reader(probe, ahead) for ahead in READ_AHEAD}
    runner = Local(Peer(ROOF, None, False, lambda threads: "", {}, {}, ()), threads)
    opened = {name: runner.add(name, Ready(call, np.asarray), 0) for name, call in calls.items()}
    return [Contender(ROOF, name, runner, opened[name]) for name in calls]


def _reader(probe: RoofProbe, ahead: int) -> Callable[[], None]:
    return lambda: probe.read(ahead)


def open_peers(
    w: Workload, peers: Sequence[tuple[Peer, Runner]], expected: F32Array, step: Step
) -> tuple[list[Contender], list[dict[str, str]]]:
    """(those that gave our result, those that are not timed and why)."""
    good, skipped = [], []
    names = [(peer, runner, variant) for peer, runner in peers for variant in peer.variants_for(w)]
    for index, (peer, runner, variant) in enumerate(names):
        step(0.3 * index / len(names), f"check {peer.name} {variant}")
        contender = Contender(peer.name, variant, runner, runner.open(w, variant))
        reason = contender.opened.reason
        if not reason and contender.opened.result is not None:
            contender.error = largest_error(contender.opened.result, expected)
            if not contender.error <= LARGEST_ERROR[w.type]:  # NaN is not
                reason = f"wrong: differs from ours by {contender.error:.2g}"
        if reason:
            skipped.append(_skip(contender, reason))
        else:
            good.append(contender)
    return good, skipped


def _skip(contender: Contender, reason: str) -> dict[str, str]:
    return {"peer": contender.peer, "variant": contender.variant, "reason": reason}


def largest_error(result: F32Array, expected: F32Array) -> float:
    if result.shape != expected.shape:
        return float("nan")
    return float(np.abs(result - expected).max())


def spot_error(w: Workload, result: F32Array) -> float:
    """Our own largest error against float64 at a few rows, beyond the one rounding to a half type."""
    q, k, v = inputs(w)
    errors = []
    for index, keys, position in w.spots():
        Q, K, V = (wide(np.ascontiguousarray(x), w.type) for x in (q[index][None], k[keys], v[keys]))
        truth, _ = attention64(Q[None, None], K[None, None], V[None, None], **w.arguments | {"q_offset": position})
        error = np.abs(result[index] - truth[0, 0, 0])
        errors.append(float((error - half_unit(w.type, truth[0, 0, 0])).max()))
    return max(0.0, *errors)


def half_unit(type: str, x: Any) -> Any:
    """By how much rounding moves numbers like x at most; nothing for float32, whose error is counted in full."""
    return np.ldexp(0.5, np.frexp(x)[1] - DIGITS[type]) if type in DIGITS else 0.0


def schedule(
    everybody: Sequence[Contender], rivals: Sequence[Contender], settings: Settings
) -> tuple[int, list[set[int]]]:
    """(rounds, the rounds in which each of `everybody` takes part): all of them, but few for rivals that are slow."""
    fastest = min(x.typical for x in everybody if x.peer != ROOF)
    slow = [x in rivals and x.typical > max(SLOW * fastest, settings.burst) for x in everybody]
    regular = sum(
        x.typical + max(x.typical, settings.burst) for x, is_slow in zip(everybody, slow, strict=True) if not is_slow
    )
    rounds = settings.repeat or min(MOST_ROUNDS, max(settings.fewest, int(settings.seconds / regular)))
    few = {x * rounds // settings.slow_rounds for x in range(settings.slow_rounds)}
    return rounds, [few if is_slow else set(range(rounds)) for is_slow in slow]


def roof_record(probe: RoofProbe | None, roof: Sequence[Contender]) -> dict[str, Any] | None:
    """Operations and bytes a second, by the median and at best; of the two ways to read, the faster one."""
    if probe is None:
        return None
    fma, crowded, product, *reads = roof
    read = min(reads, key=lambda x: statistics.median(x.seconds))
    return {
        "flops": probe.flops / statistics.median(fma.seconds),
        "flops_best": probe.flops / min(map(min, fma.bursts)),
        "product": probe.product_flops / statistics.median(product.seconds),
        "product_best": probe.product_flops / min(map(min, product.bursts)),
        "read": probe.nbytes / statistics.median(read.seconds),
        "read_best": probe.nbytes / min(map(min, read.bursts)),
        "read_kernel": read.variant,
        "fma_rounds": _rounds(fma), "crowded_rounds": _rounds(crowded), "product_rounds": _rounds(product),
        "read_rounds": _rounds(read),
        "fma_flops": probe.flops, "product_flops": probe.product_flops, "read_bytes": probe.nbytes,
    }  # fmt: skip


def record(x: Contender) -> dict[str, Any]:
    """What was measured, in seconds and bytes."""
    calls = [seconds for times in x.bursts for seconds in times]
    return {
        "peer": x.peer, "variant": x.variant, "version": x.runner.version, "median": statistics.median(x.seconds),
        "best": min(calls), "lowest": min(x.seconds), "highest": max(x.seconds), "calls": len(calls),
        "rounds": _rounds(x), "first": x.opened.first_seconds,
        "growth": x.opened.growth, "first_growth": x.opened.first_growth, "max_error": x.error,
    }  # fmt: skip


def _rounds(x: Contender) -> list[float]:
    """Seconds, one figure a round."""
    return [float(f"{seconds:.6g}") for seconds in x.seconds]

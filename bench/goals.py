"""The goals of Holdfast relative to the best peer of the same run, and whether they are reached."""

from dataclasses import dataclass

from images import NOT_DURABLE
from reads import percentiles

MIB = 1 << 20
RSS_BYTES_MAX = 64 * MIB

FIGURES = {
    "wall": lambda run: run.wall_s,
    "cpu": lambda run: run.cpu_s,
    "added": lambda run: run.figures.get("added_bytes"),
    "stored": lambda run: run.figures.get("repository_bytes"),
}


@dataclass(frozen=True)
class Goal:
    """Holdfast's median must be at most `ratio` times that of the best peer."""

    job: str
    figure: str
    ratio: float


GOALS = [
    Goal("first", "wall", 0.60),
    Goal("day1", "wall", 0.35),
    Goal("day2", "wall", 0.30),
    Goal("unchanged", "wall", 0.25),
    Goal("restore", "wall", 0.65),
    Goal("verify", "wall", 0.60),
    Goal("first", "stored", 0.95),
    Goal("day1", "added", 0.75),
    Goal("day2", "added", 0.05),
    Goal("second", "added", 0.20),
    Goal("reads", "p50", 0.50),
    Goal("reads", "p95", 0.50),
    Goal("raw-to-qcow2", "wall", 0.80),
    Goal("qcow2-to-raw", "wall", 0.80),
    Goal("raw-to-zlib", "wall", 0.50),
    Goal("raw-to-zstd", "wall", 0.50),
]


@dataclass
class Verdict:
    """The comparison of a goal with the figures."""

    job: str
    figure: str
    goal: str
    ours: float | None
    best: float | None
    best_peer: str
    outcome: str  # PASS, FAIL, MISSING (no figure of Holdfast), NO PEER

    @property
    def ratio(self):
        return self.ours / self.best if self.ours is not None and self.best else None


def judge(results, selected):
    """A verdict for every goal whose job was selected. `results` has a Result by job and program."""
    verdicts = []
    for goal in (goal for goal in GOALS if goal.job in selected):
        by_program = results.get(goal.job, {})
        figures = {name: value_of(result, goal.figure) for name, result in by_program.items()}
        ours = figures.pop("holdfast", None)
        figures.pop(NOT_DURABLE, None)
        peers = {name: value for name, value in figures.items() if value is not None}
        best_peer = min(peers, key=peers.get, default="")
        best = peers.get(best_peer)
        if ours is None:
            outcome = "MISSING"
        elif best is None:
            outcome = "NO PEER"
        else:
            outcome = "PASS" if ours <= goal.ratio * best else "FAIL"
        verdicts.append(Verdict(goal.job, goal.figure, f"<= {goal.ratio:.2f}", ours, best, best_peer, outcome))
    return verdicts


def judge_memory(results):
    """A verdict on the largest process of each job of Holdfast, against an absolute limit."""
    verdicts = []
    for job, by_program in results.items():
        ours = by_program.get("holdfast")
        if ours is None or job == "reads":
            continue
        runs = [] if ours.problem else ours.runs
        peak = max((run.rss_bytes for run in runs), default=None)
        outcome = "MISSING" if peak is None else "PASS" if peak <= RSS_BYTES_MAX else "FAIL"
        verdicts.append(Verdict(job, "memory", f"<= {RSS_BYTES_MAX // MIB} MiB", peak, None, "", outcome))
    return verdicts


def value_of(result, figure):
    if figure in ("p50", "p95"):
        if result.problem or not result.runs:
            return None
        return percentiles(result.runs)[figure == "p95"]
    return result.median(FIGURES[figure])

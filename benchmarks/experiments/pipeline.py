"""Pipeline stages on a virtual cluster: schedules and strategies, measured and predicted, and other trainers.

    python -m benchmarks pipeline [cases=2x1x1x2:8,1x1x1x4:32] [contenders=all] [stages=2] [hosts=2] [mbit=200]

A case is the grid of each stage and the number of microbatches. The default grids are the resharding paper's grids of a
GPT, (dp, op, pp) = (2, 2, 2) and (4, 1, 2). Contenders are ``schedule/strategy``, ``1f1b/send_recv/waiting`` without
overlap of computation and transfers, ``all``, or ``ablation`` for the paper's Fig. 9; each schedule also runs with the
strategy signal. torch's and megatron-core's pipelines with the same cuts alternate with gpt4d's (``peers=false``:
without). ``channels=128`` trains a U-Transformer instead of a GPT, whose skips go straight to the stages that use them.

The simulator of schedules (``gpt4d.parallel.pipeline.simulation``) predicts each step of gpt4d. Its inputs are
the seconds of each action with the strategy signal, the seconds after the last action, and the planned seconds of each
edge's resharding.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.driver import measure
from benchmarks.interleave import WorkerSpec, contenders
from benchmarks.laboratory.strategies import STRATEGIES, ComparedPlan, gradient_plan
from benchmarks.laboratory.strategies import plan as plan_resharding
from benchmarks.settings import arguments_of, parse_sizes
from benchmarks.workloads import END, LAST, StagesConfig
from gpt4d.config import ConfigError
from gpt4d.config.schema import SCHEDULES
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.parallel.pipeline.simulation import Costs, Edge, Timeline, orders_of, simulate
from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.plan import ParallelPlan

PACKAGES = ("torch", "megatron-core")
_BYTES = 4  # float32
_WAITING = "waiting"
_FIGURE_9 = (
    "1f1b/send_recv/waiting",
    "1f1b/broadcast/waiting",
    "1f1b/broadcast",
    "eager_1f1b/broadcast",
    "eager_1f1b/signal",
)
_MAIN = "eager_1f1b/broadcast"  # compared with all other contenders


@dataclass
class Settings(StagesConfig):
    virtual: bool = True
    mbit: float = 200.0
    flops: float = 2.5e10
    repeats: int = 5
    warm_up: int = 1
    cases: str = "2x1x1x2:8,2x1x1x2:32,1x1x1x4:8,1x1x1x4:32"
    contenders: str = "all"
    peers: bool = True  # torch's and megatron-core's pipelines take part
    out: str = "benchmarks/results/pipeline"


def parse_cases(text: str, config: StagesConfig) -> list[tuple[str, int]]:
    """Return the grids and microbatches of a list such as ``2x1x1x2:8,1x1x1x4:32``. Raises ConfigError for others."""
    ranks = config.hosts * config.ranks
    cases = []
    for case in text.split(","):
        grid, _, count = case.partition(":")
        try:
            cases.append((grid, int(count)))
            fits = parse_sizes(grid).devices * config.stages == ranks and cases[-1][1] > 0
        except ValueError:
            fits = False
        if not fits:
            raise ConfigError(
                f"cases={case}: not a grid gx·gy·gz·gdata of {ranks / config.stages:g} ranks, the share of each of "
                f"{config.stages} stages, and a number of microbatches; use 2x1x1x2:8, for example"
            )
    return cases


def parse_contenders(text: str) -> list[str]:
    """Return the names of our contenders, with signal for each of their schedules. Raises ConfigError for others."""
    if text == "all":
        names = [f"{schedule}/{strategy}" for schedule in SCHEDULES for strategy in STRATEGIES]
        names += [name for name in _FIGURE_9 if name.endswith(_WAITING)]
    else:
        names = [*_FIGURE_9] if text == "ablation" else text.split(",")
    for name in names:
        schedule, _, rest = name.partition("/")
        if schedule not in SCHEDULES or rest.removesuffix(f"/{_WAITING}") not in STRATEGIES:
            raise ConfigError(
                f"contenders={name}: not a schedule/strategy; use all, ablation, or names such as eager_1f1b/broadcast "
                f"of the schedules {', '.join(SCHEDULES)} and the strategies {', '.join(STRATEGIES)}"
            )
    schedules = dict.fromkeys(name.split("/")[0] for name in names)
    return list(dict.fromkeys([*names, *(f"{schedule}/signal" for schedule in schedules)]))


def transfers(config: StagesConfig, plan: ParallelPlan, strategy: str) -> tuple[dict[Edge, float], "CopySeconds"]:
    """Return the planned seconds of each edge, and the seconds of copied weights and their gradients."""
    meshes = [StageMesh.of_grid(stage.ranks, stage.sizes, config.ranks) for stage in plan.stages]
    count = len(meshes)

    def planned(shape: tuple[int, ...], layout: Layout, source: int, target: int) -> ComparedPlan:
        return plan_resharding(shape, layout, meshes[source], layout, meshes[target], strategy=strategy)

    def seconds(resharding: ComparedPlan) -> float:
        nbytes = math.prod(resharding.shape[resharding.num_summed :]) * _BYTES
        return float(resharding.makespan) * nbytes * 8 / (config.mbit * 1e6)

    def crosses(name: str, source: int, target: int) -> float:
        tensor = plan.description.tensors[name]
        shape = tensor.shape(config.samples, config.seq_len)
        return seconds(planned(shape, tensor.layout, source % count, target % count))

    edges = {
        (source, target): sum(crosses(name, source, target) for name in names)
        for (source, target), names in plan.crossing.items()
    }
    described = [plan.description.stage(stage.parts) for stage in plan.stages]
    copies_s = CopySeconds(0.0, 0.0)
    for holder, stage in enumerate(described):
        for name, spec in stage.copied.items():
            owner = next(i for i, s in enumerate(described) if name in s.parameters and name not in s.copied)
            weight = planned(spec.shape, spec.layout, owner, holder)
            copies_s = CopySeconds(
                copies_s.gradients + seconds(gradient_plan(weight)), copies_s.weights + seconds(weight)
            )
    return edges, copies_s


class CopySeconds(NamedTuple):
    """Seconds in which the gradients of copied weights reach their owners, and in which the weights return."""

    gradients: float
    weights: float

    def exposed(self, timeline: Timeline) -> float:
        """Return the seconds for which a step of ``timeline`` waits for them.

        Gradients leave after the last backward of the stage that has the copies, the last one, and the first stage
        needs them after its own. Weights leave at the end of a step, and the last stage needs them for its first
        forward.
        """
        first, last = timeline.stages[0], timeline.stages[-1]
        late = max(0.0, last[-1].stop + self.gradients - first[-1].stop)
        return late + max(0.0, self.weights - last[0].start)


@dataclass(frozen=True)
class MeasuredCosts(Costs):
    """Costs in which actions of the last microbatch differ: gradients are reduced during its backward."""

    last_microbatch: int = 0
    last_s: Mapping[str, float] = field(default_factory=dict)  # by kind and virtual stage, such as B0

    def seconds(self, action: Action) -> float:
        if action.microbatch == self.last_microbatch:
            return self.last_s[f"{action.kind}{action.virtual_stage}"]
        return super().seconds(action)


def costs_of(
    actions_s: Mapping[str, float], virtual_stages: int, microbatches: int, edges: Mapping[Edge, float]
) -> MeasuredCosts:
    """Return the simulator's costs from the seconds of actions (``benchmarks.adapters.gpt4d_stages.ActionTimes``)."""

    def seconds(kind: str) -> list[float]:
        return [actions_s.get(f"{kind}{stage}", 0.0) for stage in range(virtual_stages)]

    last = {key.removesuffix(LAST): value for key, value in actions_s.items() if key.endswith(LAST)}
    backward = "B" if "B0" in actions_s else "I"
    costs = seconds("F"), seconds(backward), seconds("W"), edges
    return MeasuredCosts(*costs, last_microbatch=microbatches - 1, last_s=last)


def predict(config: StagesConfig, name: str, actions_s: Mapping[str, float]) -> float:
    """Return the predicted seconds of a step of the contender ``name``.

    ``actions_s`` has the seconds of actions of the same schedule with the strategy signal.
    """
    schedule, strategy = name.split("/")
    plan = config.plan(schedule)
    chunks = plan.config.parallel.pipeline.chunks_per_stage
    orders = orders_of(schedule, config.stages, config.microbatches, plan.costs, chunks)
    edges, copies_s = transfers(config, plan, strategy)
    timeline = simulate(orders, costs_of(actions_s, plan.virtual_stages, config.microbatches, edges))
    return timeline.seconds + actions_s[END] + copies_s.exposed(timeline)


def planned(config: StagesConfig, schedule: str) -> float:
    """Return the planner's seconds of a step, from the rates of links and devices alone."""
    return config.plan(schedule).step_time_s


def add_predictions(config: StagesConfig, rows: Iterable[dict]) -> None:
    """Add to our rows the predicted step, its relative error, and the throughput relative to signal's.

    Rows with broadcasts also get the step that the planner expects.
    """
    ours = {row["name"]: row for row in report.counting([*rows]) if row["family"] == "ours"}
    for name, row in ours.items():
        schedule, *_, last = name.split("/")
        if last == "broadcast":
            row["planned_s"] = planned(config, schedule)
        if (bound := ours.get(f"{schedule}/signal")) is None:
            continue
        row["throughput_of_signal"] = bound["median_s"] / row["median_s"]
        if last != _WAITING:  # the simulator's transfers overlap with computation
            row["predicted_s"] = predict(config, name, bound["actions_s"])
            row["prediction_error"] = row["predicted_s"] / row["median_s"] - 1


def compare(rows: Iterable[dict]) -> dict[str, float]:
    """Return how many times as fast as each other contender eager 1F1B with broadcasts is."""
    seconds = {f"{row['family']} {row['name']}": row["median_s"] for row in report.counting([*rows])}
    if (main := seconds.pop(f"ours {_MAIN}", None)) is None:
        return {}
    return {name: other / main for name, other in seconds.items()}


def run_case(config: Settings, grid: str, microbatches: int) -> dict:
    """Measure the contenders of a case and return rows, predictions and comparisons."""
    config, names = replace(config, grid=grid, microbatches=microbatches), parse_contenders(config.contenders)
    names = [name for name in names if not (name.startswith("interleaved") and microbatches % config.stages)]
    sizes = parse_sizes(grid)

    def spec(family: str, names: Iterable[str]) -> WorkerSpec:
        return contenders(family, "stages", arguments_of(config, StagesConfig, contenders=",".join(names)))

    specs = [spec("ours", names)]
    peers = config.peers and not config.channels
    if peers and sizes.devices == sizes.data:  # inside a stage torch has replicas
        specs.append(spec("torch", ["Schedule1F1B", "ScheduleInterleaved1F1B"]))
    if peers:
        specs.append(spec("megatron-core", ["1F1B"]))
    rows = measure(config, specs)
    add_predictions(config, rows)
    for row in rows:
        if "median_s" in row:
            row["images_per_s" if config.channels else "tokens_per_s"] = config.batch * config.seq_len / row["median_s"]
        print(describe(row), flush=True)
    comparisons = compare(rows)
    print({name: round(ratio, 3) for name, ratio in comparisons.items()}, flush=True)
    shown = {"grid": grid, "microbatches": microbatches, "stages": config.stages, "samples": config.samples}
    return {
        **shown,
        "model": asdict(config.model),
        **config.description(),
        "rows": rows,
        f"{_MAIN} against": comparisons,
    }


def describe(row: dict) -> str:
    """Format a row as one line of text."""
    text = report.line({key: value for key, value in row.items() if key != "exposed_s"})
    if "throughput_of_signal" in row:
        text += f"  {row['throughput_of_signal']:.1%} of signal's throughput"
    if "predicted_s" in row:
        text += f"  predicted {row['predicted_s']:.3f} s, {row['prediction_error']:+.1%}"
    if "planned_s" in row:
        text += f"  planned {row['planned_s']:.3f} s"
    return text


def plot(settings: Settings, results: dict) -> Any:
    """Return a figure with a panel per case: the measured steps, and marks for the predicted steps."""
    from matplotlib.figure import Figure

    cases = results["cases"]
    height = 1.4 + 0.22 * max(len(case["rows"]) for case in cases)
    figure = Figure(figsize=(5.2 * len(cases), height), layout="constrained")
    for panel, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        # Waits inside an action are part of its time in these plots.
        rows = [row | {"exposed_s": {}} for row in report.counting(case["rows"])]
        labels = [row["name"] if row["family"] == "ours" else f"{row['family']} {row['name']}" for row in rows]
        report.draw_bars(panel, rows, labels)
        predicted = [(row["predicted_s"], place) for place, row in enumerate(rows) if "predicted_s" in row]
        if predicted:
            panel.plot(*zip(*predicted, strict=True), "k|", markersize=9)
        panel.set_xlabel("seconds per step; marks: predicted")
        panel.set_title(f"{case['stages']} stages of {case['grid']}, {case['microbatches']} microbatches", fontsize=10)
    return figure


def run(settings: Settings) -> Iterator[dict]:
    cases, results = parse_cases(settings.cases, settings), []
    parse_contenders(settings.contenders)
    for grid, microbatches in cases:
        print(f"--- {settings.stages} stages of {grid}, {microbatches} microbatches", flush=True)
        results.append(run_case(settings, grid, microbatches))
        yield {"cases": results}

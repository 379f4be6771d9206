"""Pictures of pipelines: one row per stage, time from left to right, transfers between the rows."""

from pathlib import Path

from gpt4d.parallel.pipeline.simulation import Timeline

_COLORS = {"F": "#7a9cc6", "B": "#c6a07a", "I": "#c6a07a", "W": "#9fbf9f"}
_NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
_MOST_LABELS = 400  # of more actions than this, no numbers would be legible


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Write a picture of a step to ``path``. A number is a microbatch; dark edges are further model chunks."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    count = len(timeline.stages)
    figure = Figure(figsize=(12, 1.2 + 0.55 * count), layout="constrained")
    panel = figure.subplots()
    labels = sum(map(len, timeline.stages)) <= _MOST_LABELS
    for stage, spans in enumerate(timeline.stages):
        for (kind, microbatch, virtual_stage), start, stop in spans:
            chunk = virtual_stage // count
            panel.broken_barh(
                [(start, stop - start)],
                (stage - 0.4, 0.8),
                color=_COLORS[kind],
                alpha=1 / (1 + 0.5 * chunk),
                ec="white",
            )
            if labels:
                panel.text((start + stop) / 2, stage, str(microbatch), ha="center", va="center", fontsize=7)
    for transfer in timeline.transfers:
        if transfer.stop > transfer.start:
            rows = transfer.source % count, transfer.target % count
            panel.plot([transfer.start, transfer.stop], rows, color="#555555", linewidth=0.6)
    panel.set_yticks(range(count), [f"stage {stage}" for stage in range(count)])
    panel.invert_yaxis()
    panel.set_xlim(0, timeline.seconds)
    panel.set_xlabel("seconds")
    panel.set_title(f"{title}: {timeline.seconds:.3g} s", fontsize=10)
    kinds = [kind for kind in _COLORS if any(span.action.kind == kind for spans in timeline.stages for span in spans)]
    handles = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), fontsize=8)
    figure.savefig(path, dpi=120)

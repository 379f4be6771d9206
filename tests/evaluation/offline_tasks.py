"""Two tasks in local files: a choice between answers, and generated answers; and texts whose likelihood is asked."""

import json
from pathlib import Path

_QUESTIONS = [
    ("The capital of the state is", ["the city", "a river of the north", "law"], 0),
    ("Gold and silver are", ["coins", "metals that the Treasury holds", "men"], 1),
    ("We, the people,", ["ask", " give", "have a government by consent"], 2),
    ("Peace with all nations is", ["war", "a duty", "the wish of every man who has seen a war"], 1),
    ("The army and the", ["navy", "nav", "men of the sea"], 0),
]
_TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
task: {task}
output_type: {output_type}
doc_to_text: "{{{{question}}}}"
"""
_CHOICES = """
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
_ANSWERS = """
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n", " the"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
_ROLLING = """
doc_to_target: "{{question}} {{choices[label]}} {{choices | join(' ')}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


def write_tasks(directory: Path) -> dict[str, Path]:
    """Write the tasks' files and return their paths by the name of the task."""
    data = directory / "questions.jsonl"
    rows = [{"question": q, "choices": choices, "label": label} for q, choices, label in _QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {}
    kinds = (("choices", "multiple_choice", _CHOICES), ("answers", "generate_until", _ANSWERS))
    for task, output_type, further in (*kinds, ("rolling", "loglikelihood_rolling", _ROLLING)):
        files[task] = directory / f"{task}.yaml"
        files[task].write_text(_TASK.format(data=data, task=task, output_type=output_type) + further)
    return files

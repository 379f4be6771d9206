"""``python -m gpt4d.parallel.resharding``: what it prints, and what it says to mistakes."""

import json
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from gpt4d.config import ConfigError
from gpt4d.parallel.resharding import __main__ as command
from gpt4d.parallel.resharding.__main__ import main

WORDS = ["src=RS0R", "src_mesh=2x4", "dst=S0RR", "dst_mesh=2x4", "shape=1024,1024,512"]


def changed(**words: str) -> list[str]:
    return [f"{key}={value}" for key, value in {**dict(word.split("=") for word in WORDS), **words}.items()]


def test_json_tells_tasks_makespan_and_lower_bound(capsys):
    main([*WORDS, "format=json"])
    told = json.loads(capsys.readouterr().out)
    assert told["makespan"] == told["lower_bound"] == 0.5
    assert told["optimal"] and (told["strategy"], told["order"]) == ("broadcast", "ensemble")
    assert len(told["tasks"]) == 4
    first = told["tasks"][0]
    assert first["tile"] == [[0, 512], [0, 512], [0, 512]] and first["elements"] == 2**27
    assert first["senders"] == [0, 1, 2, 3] and first["receivers"] == [8, 9, 10, 11]
    assert first["sends"] == [
        {
            "sender": 0,
            "sender_host": 0,
            "receivers": [8, 9, 10, 11],
            "receiver_hosts": [2],
            "start": 0.0,
            "stop": 0.25,
        }
    ]


def test_a_unit_task_is_told_once_however_often_it_is_sent(capsys):
    main([*changed(src="RRR", dst="RRR", src_mesh="2x3", dst_mesh="3x2"), "strategy=send_recv", "format=json"])
    told = json.loads(capsys.readouterr().out)
    assert len(told["tasks"]) == 1 and len(told["tasks"][0]["sends"]) == 6
    assert told["makespan"] == 3


def test_the_table_has_a_line_for_each_send(capsys):
    main([*WORDS, "order=naive"])
    out = capsys.readouterr().out
    assert out.count("[0:512, 0:512, 0:512]") == 1 and out.count("0:512]") == 4
    line = next(line for line in out.splitlines() if line.strip().startswith("[0:512, 512:1024, 0:512]"))
    start, stop = map(float, line.split()[-2:])
    assert stop - start == 0.25
    assert "makespan 0.7500, lower bound 0.5000 (the best order is not known)" in out


def test_hosts_may_be_said_for_each_device(capsys):
    main([*changed(src="S0RR", dst="S0RR", src_mesh="2x1", dst_mesh="2x1"), "src_hosts=5,5", "format=json"])
    assert json.loads(capsys.readouterr().out)["makespan"] == 1  # both halves through one host's link
    main([*changed(src="S0RR", dst="S0RR", src_mesh="2x1", dst_mesh="2x1"), "dst_hosts=0,1", "format=json"])
    assert json.loads(capsys.readouterr().out)["makespan"] == 0  # each is where it is needed


def test_the_picture_has_a_bar_for_each_send_on_both_its_hosts(tmp_path, capsys, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *how, **more: (drawn.append(figure), save(figure, *how, **more))
    )
    main([*WORDS, f"plot={tmp_path / 'gantt.png'}"])
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")
    panel = drawn[0].axes[0]
    assert [len(bars.get_paths()) for bars in panel.collections] == [2, 2, 2, 2]
    assert [label.get_text() for label in panel.get_yticklabels()] == [
        "host 0 sends",
        "host 1 sends",
        "host 2 receives",
        "host 3 receives",
    ]


def test_seed_and_effort_are_the_plan_s(capsys, monkeypatch):
    asked, whole = [], command.plan
    monkeypatch.setattr(command, "plan", lambda *how, **more: asked.append(more) or whole(*how, **more))
    main([*WORDS, "seed=3", "effort=2", "order=greedy", "strategy=send_recv"])
    assert asked == [{"strategy": "send_recv", "order": "greedy", "seed": 3, "effort": 2}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (changed(src="S0"), "src=S0: 1 dims, but shape=1024,1024,512 has 3"),
        (changed(dst="S2RR"), "dst=S2RR: dst_mesh=2x4 has no axis 2; use 0, 1"),
        (changed(dst="SRR"), "dst=SRR: use R or S with axes"),
        (changed(src_mesh="2,4"), "src_mesh=2,4: whole numbers"),
        (changed(src_mesh="0x4"), "src_mesh=0x4: whole numbers of at least 1"),
        (changed(shape="10x10"), "shape=10x10: whole numbers"),
        ([*WORDS, "dst_hosts=0,1"], "dst_hosts=0,1: 2 hosts, but dst_mesh has 8 devices"),
        ([*WORDS, "strategy=multicast"], "strategy=multicast: use one of broadcast, send_recv"),
        ([*WORDS, "order=best"], "order=best: use one of ensemble, naive"),
        ([*WORDS, "format=yaml"], "format=yaml: use one of table, json"),
        (changed(src_mesh="300x300"), "src_mesh=300x300: use 10 axes, 0 to 9, and 65536 devices"),
        (changed(shape="9" * 5000), "shape=999"),
        ([*WORDS, "plot=/tmp"], "plot=/tmp: the name of a .png"),
        ([*WORDS, "effort=0"], "effort=0: use a value of at least 1"),
        ([*WORDS, "plot=gantt"], "plot=gantt: the name of a .png"),
        ([*WORDS, "plot=nowhere/gantt.png"], "plot=nowhere/gantt.png: no such directory as nowhere"),
        ([*WORDS, "sources=1"], "sources: there is no such key"),
        (WORDS[1:], "src=… is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_told_by_key_value_and_remedy(words, said):
    with pytest.raises(ConfigError) as error:
        main(words)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_it_answers_without_torch():
    """And a mistake on the command line is one line."""
    code = "import sys; from gpt4d.parallel.resharding.__main__ import main; main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *WORDS], check=True, capture_output=True)
    command = [sys.executable, "-m", "gpt4d.parallel.resharding", *changed(dst="S7RR")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: dst=S7RR: ")

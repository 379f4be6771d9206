"""``python -m gpt4d.parallel.resharding``: its output and its error messages."""

import json
import subprocess
import sys
from unittest.mock import patch

import pytest
from matplotlib.figure import Figure

from gpt4d.parallel.resharding.__main__ import main
from tests.support.commands import wrong_messages

ARGUMENTS = ["src=RS0R", "src_mesh=2x4", "dst=S0RR", "dst_mesh=2x4", "shape=1024,1024,512"]


def changed(**values: str) -> list[str]:
    return [f"{key}={value}" for key, value in {**dict(pair.split("=") for pair in ARGUMENTS), **values}.items()]


@pytest.fixture
def answer(capsys):
    """Return a function from arguments to the command's answer in JSON."""

    def ask(*arguments: str) -> dict:
        main([*arguments, "format=json"])
        return json.loads(capsys.readouterr().out)

    return ask


def test_json_has_tasks_makespan_and_lower_bound(answer):
    output = answer(*ARGUMENTS)
    assert output["makespan"] == output["lower_bound"] == 0.5
    assert output["optimal"]
    assert len(output["tasks"]) == 4
    first, devices = output["tasks"][0], [8, 9, 10, 11]
    assert first["tile"] == [[0, 512], [0, 512], [0, 512]] and first["elements"] == 2**27
    assert first["senders"] == [0, 1, 2, 3] and first["receivers"] == devices
    send = {"sender": 0, "sender_host": 0, "receivers": devices, "receiver_hosts": [2], "start": 0.0, "stop": 0.25}
    assert first["sends"] == [send]


def test_json_lists_a_unit_task_once_with_all_its_sends(answer):
    output = answer(*changed(src="RRR", dst="RRR", src_mesh="2x1", dst_mesh="3x1"), "dst_hosts=0,1,2")
    assert len(output["tasks"]) == 1 and len(output["tasks"][0]["sends"]) == 3
    assert output["makespan"] == 1


def test_table_has_one_line_per_send(capsys):
    main(ARGUMENTS)
    out = capsys.readouterr().out
    assert out.count("[0:512, 0:512, 0:512]") == 1 and out.count("0:512]") == 4
    line = next(line for line in out.splitlines() if line.strip().startswith("[0:512, 512:1024, 0:512]"))
    start, stop = map(float, line.split()[-2:])
    assert stop - start == 0.25
    assert "makespan 0.5000, lower bound 0.5000 (optimal)" in out


def test_src_hosts_and_dst_hosts_place_each_device(answer):
    arguments = changed(src="S0RR", dst="S0RR", src_mesh="2x1", dst_mesh="2x1")
    assert answer(*arguments, "src_hosts=5,5")["makespan"] == 1  # one host's link carries both halves
    assert answer(*arguments, "dst_hosts=0,1")["makespan"] == 0  # each half is already on the host that needs it


def test_plot_has_a_bar_per_send_on_its_sending_and_receiving_hosts(tmp_path):
    with patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as saved:
        main([*ARGUMENTS, f"plot={tmp_path / 'gantt.png'}"])
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")
    panel = saved.call_args.args[0].axes[0]
    assert [len(bars.get_paths()) for bars in panel.collections] == [2, 2, 2, 2]
    rows = [f"host {host} {'sends' if host < 2 else 'receives'}" for host in range(4)]
    assert [label.get_text() for label in panel.get_yticklabels()] == rows


MISTAKES = [
    (changed(src="S0"), "^src=S0: 1 dim(s), but shape=1024,1024,512 has 3; use one R or S per dim"),
    (changed(dst="S2RR"), "^dst=S2RR: dst_mesh=2x4 has no axis 2; use 0, 1"),
    (changed(dst="SRR"), "^dst=SRR: not a layout; use R or S with mesh axes"),
    (changed(src_mesh="2,4"), "^src_mesh=2,4: use integers"),
    (changed(src_mesh="0x4"), "^src_mesh=0x4: use integers of at least 1"),
    (changed(shape="10x10"), "^shape=10x10: use integers"),
    ([*ARGUMENTS, "dst_hosts=0,1"], "^dst_hosts=0,1: 2 hosts, but dst_mesh has 8 devices"),
    ([*ARGUMENTS, "format=yaml"], "^format=yaml: use one of table, json"),
    (changed(src_mesh="300x300"), "^src_mesh=300x300: use at most 10 axes (0 to 9) and 4096 devices"),
    (changed(src="S01RR", src_mesh="64x64", dst="RS01R", dst_mesh="64x64"),
     "^src=S01RR dst=RS01R: 1048576 common tiles on these meshes; use smaller meshes"),
    (changed(shape="9" * 5000), "^shape=999"),
    ([*ARGUMENTS, "plot=."], "^plot=.: not a format of plots; use the name of a .png"),
    ([*ARGUMENTS, "plot=gantt"], "^plot=gantt: not a format of plots; use the name of a .png"),
    ([*ARGUMENTS, "plot=nowhere/gantt.png"], "^plot=nowhere/gantt.png: no directory nowhere; create it"),
    ([*ARGUMENTS, "sources=1"], "^sources: there is no such key"),
    (ARGUMENTS[1:], "^src=… is missing"),
]  # fmt: skip


def test_errors_name_key_value_and_remedy():
    assert not wrong_messages(MISTAKES, main)


TWICE = """
import runpy, sys
run = lambda: runpy.run_module("gpt4d.parallel.resharding", run_name="__main__")
run()
assert "torch" not in sys.modules
sys.argv.append("dst=S7RR")
run()
"""


@pytest.mark.slow
def test_command_runs_without_torch_and_prints_errors_on_one_line():
    process = subprocess.run([sys.executable, "-c", TWICE, *ARGUMENTS], capture_output=True, text=True)
    assert process.returncode == 1 and "makespan 0.5000" in process.stdout
    assert process.stderr.startswith("error: dst=S7RR: ") and len(process.stderr.splitlines()) == 1

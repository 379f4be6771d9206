import subprocess
import sys

import pytest

from benchmarks.interleave import Entry, interleave

# A team without a framework: it notes each turn in a file, and answers what a real one would.
TEAM = """
import json, sys, time
team, rank, log = sys.argv[1], sys.argv[2], sys.argv[3]
tell = lambda answer: print(json.dumps(answer), flush=True) if rank == "0" else None
if team == "broken" and rank == "1":
    sys.exit("out of luck")
tell({"contenders": [team + ".a", team + ".b"]})
for number, line in enumerate(sys.stdin):
    with open(log, "a") as file:
        file.write(f"{line.strip()}/{rank} ")
    while rank == "0" and open(log).read().count(team + ".") < 2 * (number + 1):
        time.sleep(0.001)  # the barrier of a real team
    tell({"seconds": float(number), "loss": 1.0})
"""


class TwoRanks:
    def __init__(self, log):
        self.log, self.started = log, []

    def start(self, command, port, **pipes):
        team = command[2]
        ranks = [[sys.executable, "-c", TEAM, team, str(rank), str(self.log)] for rank in range(2)]
        self.started += (processes := [subprocess.Popen(words, text=True, **pipes) for words in ranks])
        return processes


def test_contenders_alternate_across_teams_and_every_rank_gets_the_turn(tmp_path):
    cluster = TwoRanks(tmp_path / "log")
    rows = interleave(cluster, [Entry("One", "one"), Entry("Two", "two")], repeats=3, warm_up=1)
    noted = cluster.log.read_text().split()
    of_rank_0 = [turn.removesuffix("/0") for turn in noted if turn.endswith("/0")]
    assert of_rank_0 == ["one.a", "one.b", "two.a", "two.b"] * 4
    assert sorted(t for t in noted if t.endswith("/1")) == sorted(f"{t}/1" for t in of_rank_0)
    assert [(row["family"], row["name"]) for row in rows] == [
        ("One", "one.a"),
        ("One", "one.b"),
        ("Two", "two.a"),
        ("Two", "two.b"),
    ]
    assert rows[0]["seconds"] == [2.0, 4.0, 6.0]  # its first step, the team's 0th, was to warm up
    assert all(process.poll() is not None for process in cluster.started)


def test_a_rank_that_ends_ends_the_run_with_its_words(tmp_path):
    cluster = TwoRanks(tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"rank 1 of (?s:.*)out of luck"):
        interleave(cluster, [Entry("Broken", "broken")], repeats=100)
    assert all(process.poll() is not None for process in cluster.started)


def test_a_team_without_its_package_is_left_out_with_one_line(tmp_path, capsys):
    entries = [Entry("Absent", "absent", needs="no_such_package"), Entry("One", "one")]
    rows = interleave(TwoRanks(tmp_path / "log"), entries, repeats=1, warm_up=0)
    assert {row["family"] for row in rows} == {"One"}
    assert capsys.readouterr().out == "Absent: no_such_package is not installed, left out\n"


def test_answers_are_apart_from_what_libraries_print():
    words = (
        "from benchmarks.interleave import redirect_stdout_for_answers as redirect; answers = redirect(); "
        "print('chatter'); print('answer', file=answers)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("answer\n", "chatter\n")

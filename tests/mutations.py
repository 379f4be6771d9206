"""Faults that ``make test`` must catch.

    python -m tests.mutations [NUMBER…] [--listed]

Each mutation replaces one line of gpt4d in a temporary copy of the repository. Its tests run on the copy, and a failure
catches the mutation. Without numbers all mutations run sequentially, which takes about ten minutes. The exit code
is the number of mutations that survive. A change to ``make test`` that lets one survive has lost a claim. ``--listed``
runs only the tests that the list names.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.clone import copied_repository
from tests.support.environment import REPOSITORY

_LINE = 1000  # characters of a test's name and error
_LIMIT_S = 900  # a mutation that makes the ranks hang is caught by their timeouts long before


class Mutation(NamedTuple):
    """A fault in one line.

    Attributes:
        file: the module below gpt4d/.
        old: a fragment that occurs on exactly one line of the module.
        new: the fragment that replaces it.
        claim: the claim that the fault breaks.
        tests: the tests that run first. If they pass, all tests of ``make test`` run.
    """

    file: str
    old: str
    new: str
    claim: str
    tests: str

    def problem(self) -> str | None:
        """Return why the mutation does not apply to this version of the module, or None if it applies."""
        text = (REPOSITORY / "gpt4d" / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        return None if count == 1 else f"{self.file}: {self.old!r} occurs {count} times"


MUTATIONS = [
    # Configuration
    Mutation(
        "config/checks.py",
        "if rule.extent % parts:",
        "if parts % rule.extent:",
        "a grid that does not divide an extent of the model is refused",
        "tests/test_config.py tests/planner/test_search.py",
    ),
    Mutation(
        "config/schema.py",
        '"optimizer and learning rate", effect=Effect.RESULTS',
        '"optimizer and learning rate", effect=Effect.ROUNDING',
        "a run is not resumed with other settings of its optimizer",
        "tests/test_identity.py",
    ),
    Mutation(
        "config/length.py",
        "return math.ceil(train.tokens /",
        "return math.floor(train.tokens /",
        "a run reads at least train.tokens",
        "tests/test_length.py",
    ),
    Mutation(
        "config/conditions.py",
        "if value in values else None",
        "if value not in values else None",
        "a key that a run does not read is an error",
        "tests/test_unused.py",
    ),
    # Runtime and run directories
    Mutation(
        "runtime/consensus.py",
        "for rank, first_error in enumerate(errors):",
        "for rank, first_error in enumerate(errors[:1]):",
        "an error of any rank is raised on all ranks",
        "tests/runtime/test_consensus.py",
    ),
    Mutation(
        "config/commands.py",
        "sys.exit(error.exit_code)",
        "sys.exit(1)",
        "a job whose port is taken ends with the exit code of a requeue",
        "tests/runtime/test_isolation.py",
    ),
    Mutation(
        "runtime/watchdog.py",
        "next_rank = (self.rank + 1) % self.size",
        "next_rank = self.rank",
        "a silent rank is noticed",
        "tests/runtime/test_watchdog.py",
    ),
    Mutation(
        "checkpoint/trained_model.py",
        "if sizes.devices * settings.stages != world_size:",
        "if sizes.devices != world_size:",
        "the plan of a trained model uses all processes",
        "tests/test_cli.py",
    ),
    Mutation(
        "runs/lock.py",
        "self.restart < other.restart",
        "self.restart <= other.restart",
        "only a requeued job takes over the lock of its earlier start",
        "tests/test_runs.py",
    ),
    Mutation(
        "runs/history.py",
        "if known > step]:",
        "if known < step]:",
        "a restart discards the losses of the steps that it repeats",
        "tests/test_runs.py",
    ),
    # Collectives, layers, engine
    Mutation(
        "parallel/comm/cpu/shared_memory.py",
        "for other in slots[2:]:",
        "for other in slots[1:]:",
        "an all-reduce through shared memory counts each rank once",
        "tests/parallel/test_shared_memory.py",
    ),
    Mutation(
        "parallel/comm/collectives.py",
        "2 * (self.size - 1) / self.size * tensor.nbytes",
        "(self.size - 1) / self.size * tensor.nbytes",
        "counted bytes equal planned bytes",
        "tests/test_trainer.py::test_bytes_of_a_layer_follow_the_papers_equations",
    ),
    Mutation(
        "parallel/layers/norm.py",
        "sums, count = axis.all_reduce(sums, parameter=ctx.parameter), count * axis.size",
        "sums, count = axis.all_reduce(sums, parameter=ctx.parameter), count",
        "a norm divides by the number of features of all ranks",
        "tests/parallel/layers/test_layers.py",
    ),
    Mutation(
        "parallel/context.py",
        "summed = self.head_axes(summed)[::-1]",
        "summed = ()",
        "the gradient of a norm of heads is all-reduced over the axes that split the heads",
        "tests/model/test_families.py",
    ),
    Mutation(
        "parallel/layers/loss.py",
        "logits[:, columns:] = 0",
        "logits[:, columns:] = 1",
        "the padding of the vocabulary has no gradient",
        "tests/parallel/layers/test_layers.py",
    ),
    Mutation(
        "parallel/layers/sequence.py",
        "(self.indices[:, None, :, None] == self.indices[:, None, None, :]).tril_()",
        "(self.indices[:, None, :, None] >= self.indices[:, None, None, :]).tril_()",
        "with data.reset_attention, tokens attend to their own document only",
        "tests/parallel/layers/test_documents.py",
    ),
    Mutation(
        "parallel/engine/prefetch.py",
        "        while self._scattering:",
        "        if self._scattering:",
        "a step ends after all reduce-scatters",
        "tests/parallel/test_sharded_weights.py tests/parallel/test_interleave.py",
    ),
    Mutation(
        "parallel/engine/reduction.py",
        'kind = "reduce_scatter" if bucket.sharded and not others else "all_reduce"',
        'kind = "reduce_scatter" if bucket.sharded else "all_reduce"',
        "gradients with several axes are reduce-scattered over the last axis only",
        "tests/parallel/test_gradient_reducer.py tests/test_trainer.py",
    ),
    Mutation(
        "parallel/engine/interleave.py",
        "return [results[index] for index in range(len(chunks))]",
        "return [results[index] for index in reversed(range(len(chunks)))]",
        "chunks of a microbatch keep their order",
        "tests/parallel/test_interleave.py",
    ),
    Mutation(
        "parallel/random.py",
        "lanes = _lanes(part_keys, 2 * columns, 2 * first)",
        "lanes = _lanes(part_keys, 2 * columns, first)",
        "initial weights are equal on every grid",
        "tests/parallel/test_random.py",
    ),
    Mutation(
        "parallel/gradient_reducer.py",
        "return all(index == 0 for name, index in grid.indices.items()",
        "return all(index >= 0 for name, index in grid.indices.items()",
        "the gradient norm counts a replicated parameter once",
        "tests/model/test_families.py",
    ),
    # Pipelines and resharding
    Mutation(
        "parallel/pipeline/schedule.py",
        "group, place = divmod(index, stages * chunks)",
        "group, place = divmod(index, stages)",
        "the interleaved schedule computes every microbatch on every virtual stage",
        "tests/parallel/pipeline/test_schedules.py",
    ),
    Mutation(
        "parallel/pipeline/runtime.py",
        "gradients[name] = gradients[name] + gradient if name in gradients else gradient",
        "gradients[name] = gradient",
        "gradients of a tensor that crosses to several stages are added",
        "tests/parallel/pipeline/test_runtime.py",
    ),
    Mutation(
        "parallel/resharding/plan.py",
        "if place and 0 <= time_step - place + 1 < len(chunks):",
        "if place and 0 <= time_step - place < len(chunks):",
        "a device receives every chunk of a chain",
        "tests/parallel/resharding/test_program.py",
    ),
    Mutation(
        "parallel/resharding/jobs.py",
        "receiving[host] += job.duration",
        "receiving[host] = job.duration",
        "the lower bound of a resharding counts all jobs of a receiver",
        "tests/parallel/resharding/test_planning.py",
    ),
    # The step and the optimizer
    Mutation(
        "optim/optimizer.py",
        "divisor = (norm / limit).clamp(min=1).float()",
        "divisor = (norm / limit).float()",
        "gradients below the limit are not scaled",
        "tests/optim/test_optimizer.py tests/test_trainer.py::test_a_run_equals_plain_torch_with_transformers_model",
    ),
    Mutation(
        "trackers/run_trackers.py",
        "step < self._last_step or",
        "step < 0 or",
        "a restart that repeats steps leaves one curve in each tracker",
        "tests/test_trackers.py",
    ),
    Mutation(
        "optim/muon.py",
        "complete[message.matrix][tuple(slice(*ends) for ends in message.region)] = part",
        "complete[message.matrix].flatten()[: part.numel()] = part.flatten()",
        "a home has the complete matrix",
        "tests/optim/test_muon.py",
    ),
    Mutation(
        "parallel/grid.py",
        "members, world = sorted(self.ranks), self.world",
        "members, world = list(self.ranks), self.world",
        "the axis of a stage's ranks has the order of its process group",
        "tests/optim/test_muon.py",
    ),
    Mutation(
        "parallel/layers/loss.py",
        "scale = scale * (1 + 2 * z_loss * log_sums)",
        "scale = scale * (1 + z_loss * log_sums)",
        "the z-loss has the gradient of its square",
        "tests/parallel/layers/test_layers.py",
    ),
    Mutation(
        "step.py",
        "return loss if grid.x.index == grid.y.index == 0 else",
        "return loss if grid.x.index == 0 else",
        "the loss counts each sample once",
        "tests/parallel/test_exact_plans.py",
    ),
    # Model families
    Mutation(
        "model/llama.py",
        "kept + (1 - kept) / config.rope_factor",
        "kept + (1 - kept) * config.rope_factor",
        "rotary frequencies are scaled as in transformers",
        "tests/model/test_families.py",
    ),
    Mutation(
        "model/gemma3.py",
        "zip(rotary_frequencies(config), (config.window, None), strict=True)",
        "zip(rotary_frequencies(config), (None, config.window), strict=True)",
        "local blocks of a Gemma attend to a window",
        "tests/model/test_families.py",
    ),
    Mutation(
        "parallel/layers/routing.py",
        "spec.balance_rate * spec.experts * each",
        "spec.balance_rate * each",
        "the balance loss has the factor of transformers'",
        "tests/model/test_families.py",
    ),
    Mutation(
        "parallel/layers/routing.py",
        "(counts.mean() - counts).sign()",
        "(counts - counts.mean()).sign()",
        "the bias of an expert with a low load grows",
        "tests/parallel/test_routers.py",
    ),
    # The planner
    Mutation(
        "planner/topology.py",
        "group_bandwidth(c.level, c.members) / c.sharing",
        "group_bandwidth(c.level, c.members)",
        "groups that share a link share its bandwidth",
        "tests/planner/test_topology.py",
    ),
    Mutation(
        "planner/stages.py",
        "            self._alone_gib,\n",
        "",
        "the fewest devices that the planner names are enough",
        "tests/planner/test_options.py tests/planner/test_search.py",
    ),
    # Data and tasks
    Mutation(
        "data/sampler.py",
        "outside = outside[result[outside] >= size]",
        "outside = outside[result[outside] > size]",
        "an epoch has each sample once",
        "tests/data/test_sampler.py",
    ),
    Mutation(
        "data/loader.py",
        "self.places = parts[:, shard]",
        "self.places = parts[:, 0]",
        "no sample is in two shards of a batch",
        "tests/data/test_loader.py",
    ),
    Mutation(
        "task/diffusion_process.py",
        "return signal * epsilon - noise * x_0",
        "return signal * epsilon + noise * x_0",
        "the target of a v-prediction is that of Salimans & Ho",
        "tests/task/test_diffusion_process.py",
    ),
    Mutation(
        "task/generation.py",
        "rows = [texts[index][-self.capacity :] for index in self.own]",
        "rows = [texts[index][: self.capacity] for index in self.own]",
        "a text that is longer than the model's positions is continued from its last tokens",
        "tests/task/test_generation.py",
    ),
    # Evaluation
    Mutation(
        "evaluation/harness.py",
        "self.tok_encode(requests[index].args[0])[-longest:]",
        "self.tok_encode(requests[index].args[0])[:longest]",
        "a prompt that is too long for the model is truncated from its beginning",
        "tests/evaluation/test_harness.py",
    ),
    # Checkpoints
    Mutation(
        "checkpoint/lifecycle.py",
        "for path in older[: len(older) - (keep - 1)]:",
        "for path in older[: len(older) - keep]:",
        "a run has at most checkpoint.keep checkpoints",
        "tests/checkpoint/test_lifecycle.py",
    ),
    Mutation(
        "checkpoint/saving.py",
        "raise failure",
        "return saved",
        "a save that fails ends the run with an error",
        "tests/checkpoint/test_saving.py",
    ),
    # Commands and metrics
    Mutation(
        "training/sweep.py",
        "return run.history.step >= train.steps",
        "return run.history.step > train.steps",
        "a sweep does not repeat finished jobs",
        "tests/test_sweep.py",
    ),
    Mutation(
        "training/dry_run.py",
        """if {"-m", "--multirun"} & set(arguments):""",
        """if {"-m", "--multirun"} <= set(arguments):""",
        "a sweep has no dry run",
        "tests/test_dry_run.py",
    ),
    Mutation(
        "runs/logger.py",
        'compute = values["step_time_s"] - total_exposed',
        'compute = values["step_time_s"] - total_exposed - hidden',
        "hidden communication is part of the time of the computation",
        "tests/test_metrics.py",
    ),
    Mutation(
        "optim/monitor.py",
        "self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics.skipped else 0",
        "self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics.skipped else self.skipped_in_a_row",
        "only consecutive skipped steps end a run",
        "tests/test_monitor.py",
    ),
]


class Failure(NamedTuple):
    """The first test that fails, and the first line of its error."""

    test: str
    error: str


def _first_failure(copy: Path, tests: list[str]) -> Failure | None:
    """Run tests in the copy until one fails. Return None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": str(_LINE)}
    try:
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Failure("no test", f"no answer within {_LIMIT_S} s")
    assert result.returncode != pytest.ExitCode.NO_TESTS_COLLECTED, f"no test matches {tests}"
    if result.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", result.stdout, re.MULTILINE)
    if failed is None:
        return Failure("no test", f"pytest ended with code {result.returncode}: {result.stdout[-500:]}")
    return Failure(failed[1], failed[2] or "")


def catch(mutation: Mutation, only_listed: bool = False) -> Failure | None:
    """Return the failure that catches a mutation, or None if it survives: the test must pass without the mutation."""
    with copied_repository() as copy:
        path = copy / "gpt4d" / mutation.file
        original = path.read_text(encoding="utf-8")
        path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
        failure = _first_failure(copy, mutation.tests.split())
        if not failure and not only_listed:
            failure = _first_failure(copy, [])
        path.write_text(original, encoding="utf-8")
        if failure and (copy / failure.test.partition("::")[0]).is_file() and _first_failure(copy, [failure.test]):
            print(f"{failure.test} also fails without the mutation")
            return None
    return failure


def run(mutations: Sequence[Mutation], numbers: Sequence[int] = (), only_listed: bool = False) -> int:
    """Run the mutations with the given numbers, or all of them, and return the number of survivors."""
    survivors = 0
    for number in numbers or range(1, len(mutations) + 1):
        mutation = mutations[number - 1]
        if problem := mutation.problem():
            raise SystemExit(f"mutation {number} is out of date: {problem}")
        caught = catch(mutation, only_listed)
        survivors += caught is None
        verdict = f"caught by {caught.test}: {caught.error}" if caught else "SURVIVED"
        print(f"{number:2} {mutation.file}: {mutation.claim}: {verdict}", flush=True)
    return survivors


def main(arguments: list[str]) -> int:
    """Run the mutations of this file as the arguments say, and return the number of survivors."""
    numbers = [int(argument) for argument in arguments if argument != "--listed"]
    return run(MUTATIONS, numbers, "--listed" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

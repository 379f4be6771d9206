"""Plans as jobs of Megatron-LM and torchtitan, and their jobs as plans."""

import json
from dataclasses import fields

import pytest

from gpt4d.config import ConfigError, known_keys
from gpt4d.planner.trainers import TRAINERS, TrainerJob, _values, arguments
from tests.support.planner_runs import ask
from tests.support.settings import configured

GPT = ("model=gpt_125m", "model.layers=6", "cluster=dgx_h100", "train.batch_size=64")
MOE = ("model=mixtral_8x7b", "model.layers=2", "cluster=dgx_h100", "train.batch_size=64", "train.seq_len=1024")
LLAMA = ("model=llama3_8b", "cluster=dgx_h100", "train.batch_size=64", "train.seq_len=1024")


def parsed(line: str) -> dict[str, str]:
    """Return the values of another trainer's arguments by the last part of the name; flags have empty values."""
    words = (word.removeprefix("--").partition("=") for word in line.split())
    return {name.rpartition(".")[2]: value for name, _, value in words}


MEGATRON = "tensor-model-parallel-size={} pipeline-model-parallel-size={} context-parallel-size={} micro-batch-size={} "
TITAN = "tensor_parallel_degree={} pipeline_parallel_degree={} context_parallel_degree={} local_batch_size={} "
TITAN += "data_parallel_shard_degree={} data_parallel_replicate_degree={} fsdp_reshard_after_forward={} "


@pytest.mark.parametrize(
    ("trainer", "model", "job", "plan", "expected"),
    [
        ("megatron", GPT, "tp=4 pp=2 dp=2 vp=3 micro_batch=2 recompute=full",
         "gx=4 gy=1 gz=1 gdata=2 pipeline.stages=2 pipeline.schedule=interleaved_1f1b pipeline.chunks_per_stage=3",
         MEGATRON.format(4, 2, 1, 2) + "num-virtual-stages-per-pipeline-rank=3 recompute-granularity=full bf16= "
         "use-distributed-optimizer= global-batch-size=64 num-layers=6 ffn-hidden-size=3072 hidden-dropout=0.0"),
        ("megatron", GPT, "tp=2 cp=2 world_size=16", "gx=2 gy=1 gz=1 gdata=8",
         MEGATRON.format(2, 1, 2, 16) + "cp-comm-type=all_gather overlap-grad-reduce="),
        ("megatron", MOE, "tp=2 dp=8 ep=4 micro_batch=1", "gx=2 gy=1 gz=4 gdata=2",
         MEGATRON.format(2, 1, 1, 1) + "expert-model-parallel-size=4 num-experts=8 moe-router-topk=2 "
         "num-query-groups=8 swiglu="),
        ("torchtitan", LLAMA, "tp=2 pp=2 cp=2 dp=4 micro_batch=1 recompute=selective",
         "gx=2 gy=1 gz=8 gdata=1 pipeline.schedule=1f1b pipeline.microbatches=16",
         TITAN.format(2, 2, 2, 16, 4, 1, "never") + "pipeline_parallel_schedule=1F1B mode=selective "
         "pipeline_parallel_layers_per_stage=16 pipeline_parallel_microbatch_size=1"),
        ("torchtitan", LLAMA, "tp=2 dp=4 replicate=2 micro_batch=4", "gx=2 gy=1 gz=4 gdata=2",
         TITAN.format(2, 1, 1, 4, 4, 2, "always") + "flavor=8B"),
    ],
)  # fmt: skip
def test_a_job_of_another_trainer_has_a_plan_whose_arguments_are_those_of_the_job(trainer, model, job, plan, expected):
    question = *model, f"trainer={trainer}", *job.split()
    (planned,) = json.loads(ask(*question, "format=json"))
    assert {f"parallel.{word}" for word in plan.split()} <= set(planned["overrides"])
    words = planned["command"].split()
    assert {"parallel.sequence_parallel=true", "optim.algorithm=adamw"} <= set(words)
    assert ("parallel.replicated_layers=2" in words) == (model is MOE)
    line, *notes = ask(*question, f"format={trainer}").splitlines()
    assert not notes and parsed(expected).items() <= parsed(line).items()


@pytest.mark.parametrize(
    ("trainer", "model", "plan", "missing"),
    [
        ("megatron", GPT, "grid=2x2x1x1 train.loss_chunks=8", "parallel.gy=2, train.loss_chunks=8"),
        ("megatron", GPT, "grid=1x1x4x2 parallel.replicated_layers=3", "parallel.replicated_layers=3"),
        ("megatron", GPT, "grid=1x1x1x2 parallel.pipeline.stages=2", "parallel.pipeline.schedule=eager_1f1b"),
        ("megatron", ("model=gemma3_tiny", *GPT[2:]), "grid=1x1x1x8", "model family=gemma3"),
        ("torchtitan", LLAMA, "grid=1x1x2x8 parallel.context=4", "parallel.gz / parallel.context"),
        ("torchtitan", LLAMA, "grid=2x1x1x8 parallel.chunks=2 optim.shard_states=true",
         "parallel.sequence_parallel=False, optim.shard_states=True, parallel.chunks=2"),
    ],
)  # fmt: skip
def test_settings_without_an_equivalent_are_named(trainer, model, plan, missing):
    _, note = ask(*model, *plan.split(), "optim.algorithm=adamw", f"format={trainer}").splitlines()
    assert note == f"# without an equivalent in {TRAINERS[trainer].title}: {missing}"


def test_the_first_plan_of_a_ranking_is_printed_as_arguments():
    question = *GPT, "world_size=2", "parallel.pipeline.stages=1"
    line = ask(*question, "format=megatron").splitlines()[0]
    (best, *_) = json.loads(ask(*question, "format=json"))
    assert parsed(line)["tensor-model-parallel-size"] == str(best["grid"]["x"])
    assert parsed(line)["micro-batch-size"] == str(best["micro_batch_size"])


def test_stages_of_different_grids_have_no_arguments():
    config = configured([*GPT, "parallel.pipeline.stages=2", "parallel.pipeline.stage_grids=[2x1x1x1,1x1x1x2]"])
    with pytest.raises(ConfigError, match="format=megatron: the plan's stages have different grids"):
        arguments("megatron", config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tp=8", "tp=8: belongs to a job of another trainer; add trainer=megatron or torchtitan"),
        ("trainer=axonn", "trainer=axonn: use one of megatron, torchtitan"),
        ("trainer=megatron tp=0", "tp=0: use a value of at least 1"),
        ("trainer=megatron replicate=2", "replicate=2: Megatron-LM has no such degree; leave it out"),
        ("trainer=megatron tp=4 world_size=6", "world_size=6: not a multiple of the product of the degrees, 4"),
        ("trainer=megatron tp=4 dp=2 world_size=16", "world_size=16: grid=4x1x1x2 has 8 device(s)"),
        ("trainer=megatron ep=2", "ep=2: z splits experts over all its ranks; use 1, because the model has no experts"),
        ("trainer=megatron model=moe_tiny ep=3 dp=8", "ep=3: z splits experts over all its ranks; use 1, 2, 4, 8"),
        ("trainer=torchtitan model=moe_tiny dp=8", "ep=1: z splits experts over all its ranks; use 8"),
        ("trainer=megatron vp=2", "vp=2: needs several stages; set pp, or leave vp out"),
        ("trainer=megatron pp=2 dp=8 micro_batch=3", "train.batch_size=64: use a multiple of 24 samples"),
        ("trainer=megatron grid=1x1x1x1", "grid=1x1x1x1: follows from the degrees of the other trainer's job"),
        ("format=megatron", "format=megatron: is a form of plans; add world_size=64 or grid=4x1x2x1"),
        ("format=megatron world_size=8 parallel.mode=atp", "format=megatron: has no meshes; use parallel.mode=4d"),
        ("trainer=megatron format=megatron price=2", "price=2: is added to the hours of plans"),
    ],
)
def test_a_mistake_in_a_job_is_one_line(words, message):
    answer = ask(*GPT, *words.split())
    assert message in answer and answer.count("\n") == 1


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_row_is_a_setting_and_each_argument_of_the_planner_has_a_row(trainer):
    rows, config = TRAINERS[trainer].rows, configured([*GPT, "parallel.gdata=1"])
    models = {f"model.{key}" for model in (GPT, MOE, LLAMA) for key in vars(configured([*model]).model)}
    known = {*known_keys(), *models, *_values(config)}
    assert {row.key for row in rows} <= known
    named = {row.name for row in rows if row.name} | {"trainer", "dp", "replicate"}
    assert named == {field.name for field in fields(TrainerJob)}

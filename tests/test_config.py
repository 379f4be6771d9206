"""What bad input gets: one line with the key, the value and what would do, before any process group exists."""

import subprocess
import sys

import pytest
import yaml

from gpt4d.config import CONFIG_DIR, ConfigError, GridSizes, compose, grid_problem, profiled_steps
from gpt4d.validation import validate

SHIPPED_MODELS = sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.gxx=2", "parallel.gxx: there is no such key; did you mean parallel.gx?"),
        ("steps=3", "steps: there is no such key; did you mean train.steps?"),
        ("+foo=2", "foo: there is no such key"),
        ("+parallel.depth=2", "parallel.depth: there is no such key; there are mode, gx, gy, gz, gdata"),
        ("parallel.gx=two", "parallel.gx: Value 'two' of type 'str' could not be converted to Integer"),
        ("model=gpt_unheard_of", "gpt_125m"),
        ("train.steps=[3", "'train.steps=[3': not an override"),
    ],
)
def test_an_override_that_does_not_fit_the_schema_is_told_in_one_line(override, said):
    with pytest.raises(ConfigError) as error:
        compose([override])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("world_size", "overrides", "said"),
    [
        (1, ["parallel.gx=2"], "parallel.gx·gy·gz=2·1·1=2 does not divide the 1 process(es)"),
        (8, ["parallel.gx=2", "parallel.gdata=2"], "use parallel.gdata=4"),
        (1, ["parallel.gx=0"], "parallel.gx=0"),
        (3, ["parallel.gx=3"], "parallel.gx=3 does not divide model.heads=4: use one of 1, 2, 4"),
        (3, ["parallel.gy=3"], "parallel.gy·gz=3 does not divide model.hidden=128"),
        (
            8,
            ["parallel.gz=8", "model.vocab_multiple=1", "model.vocab_size=4097"],
            "does not divide the padded vocabulary=4097: use one of 1, 17, 241, 4097 (or another model.vocab_multiple)",
        ),
        (3, ["parallel.gdata=3"], "train.batch_size=8 cannot be split over parallel.gdata·gz=3: use a multiple of 3"),
        (2, ["train.micro_batch_size=3"], "train.micro_batch_size=3 does not divide"),
        (1, ["train.seq_len=512"], "train.seq_len=512 is longer than model.max_positions=256"),
        (1, ["model.heads=5"], "model.heads=5 does not divide model.hidden=128: use one of 1, 2, 4"),
        (1, ["train.precision=fp8"], "train.precision=fp8: use one of auto, fp32, bf16"),
        (1, ["train.steps=0"], "train.steps=0: use a value of at least 1"),
        (1, ["model.dropout=1.0"], "model.dropout=1.0"),
        (1, ["data.tokenizer_vocab=5000"], "data.tokenizer_vocab=5000 is more than model.vocab_size=4096"),
        (1, ["data=text"], "data.path=null"),
        (1, ["data=text", "data.path=/no/such/*.txt"], "data.path='/no/such/*.txt' matches no file"),
        (1, ["data=text", "data.path=tests"], "data.path='tests' matches no file: a directory; use 'tests/*.txt'"),
        (1, ["data.source=tape"], "data.source=tape: use one of sotu, text"),
        (1, ["checkpoint.resume=/no/such"], "checkpoint.resume='/no/such'"),
        (
            1,
            ["profile.steps=ten"],
            "profile.steps='ten': use the number of a step, such as 10, or a range such as 10-12",
        ),
        (1, ["profile.steps=1-2-3"], "profile.steps='1-2-3': use the number of a step"),
        (1, ["profile.steps=0"], "profile.steps=0: the first step of a run is 1; use steps from 1 to 600"),
        (1, ["profile.steps=12-10"], "profile.steps=12-10: the range ends before it begins; use 10-12"),
        (1, ["profile.steps=601-700"], "profile.steps=601-700: the run ends with step train.steps=600"),
        (1, ["optim.min_lr=1"], "optim.min_lr=1.0 is above optim.lr"),
    ],
)
def test_a_wrong_value_is_told_with_what_would_do(world_size, overrides, said):
    with pytest.raises(ConfigError) as error:
        validate(compose(overrides), world_size)
    assert said in str(error.value)


def test_gdata_fills_the_world():
    assert validate(compose(["parallel.gx=2", "parallel.gz=2"]), 16) == GridSizes(2, 1, 2, 4)


@pytest.mark.parametrize(("typed", "steps"), [("10", (10, 10)), ("10-12", (10, 12)), ("null", None)])
def test_steps_to_profile_are_a_number_or_a_range(typed, steps):
    assert profiled_steps(compose([f"profile.steps={typed}"])) == steps


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_every_shipped_model_is_valid_and_splits_over_a_node_of_eight(model):
    config = compose([f"model={model}", "parallel.gx=2", "parallel.gy=2", "parallel.gz=2"])
    assert config.model.name == model
    assert validate(config, 16) == GridSizes(2, 2, 2, 2)


def test_what_the_rules_allow_gives_every_layout_equal_parts():
    """grid_problem's rules are those of the layers: a grid it lets pass cuts no parameter unevenly, and only it."""
    import itertools

    from gpt4d.config import GPT2Config, TrainConfig

    model = GPT2Config(layers=1, hidden=24, heads=12, vocab_size=48, vocab_multiple=12, max_positions=8)
    allowed = 0
    for sizes in itertools.starmap(GridSizes, itertools.product(range(1, 7), repeat=3)):
        fits = grid_problem(model, TrainConfig(batch_size=60, seq_len=8), sizes) is None
        extents = {  # of the dims the layers cut: rows of normal and transposed layers, columns, heads, vocabulary
            (24, sizes.y * sizes.z), (24, sizes.x * sizes.z), (96, sizes.x * sizes.z), (24, sizes.y), (24, sizes.x),
            (96, sizes.x), (12, sizes.x), (48, sizes.x * sizes.z), (60, sizes.z),
        }  # fmt: skip
        assert fits == all(extent % parts == 0 for extent, parts in extents), sizes
        allowed += fits
    assert allowed > 10


def test_every_config_group_is_one_of_the_defaults():
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    composed = yaml.safe_load((CONFIG_DIR / "train.yaml").read_text())
    named = {key for entry in composed["defaults"] if isinstance(entry, dict) for key in entry if "/" not in key}
    assert named == groups


def test_checking_a_configuration_imports_no_torch():
    script = "import sys, gpt4d.config as c; c.validate(c.compose([]), 1); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)

"""Secrets in the environment of a run do not reach its files."""

import os

from tests.runtime.test_faults import at_step, shorten_timeouts
from tests.support.jobs import LaunchedJob

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_NotARealTokenNotARealToken",
    "HUGGING_FACE_HUB_TOKEN": "hf_AnotherTokenThatIsNotReal",
    "AWS_SECRET_ACCESS_KEY": "NotARealSecretEitherNotARealSecret",
}


def set_secrets_and_fail(rank):
    os.environ.update(SECRETS)
    shorten_timeouts()

    def fail(_):
        raise ValueError("any")

    if rank == 1:
        at_step(4, fail)


def test_no_secret_is_in_logs_configs_or_checkpoints(ranks, tiny):
    config = tiny("logging.trackers=[wandb,tensorboard]", "checkpoint.every=2", "profile.steps=1", "parallel.gz=2")
    with LaunchedJob(ranks.context, config, 2, set_secrets_and_fail) as job:
        assert job.exit_codes() == [1, 1], job.outputs()
    files = [path for path in job.run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "meta.json", "run_id"} <= {path.name for path in files}
    for path in [*files, *job.logs]:
        content = path.read_bytes()
        assert not [name for name, secret in SECRETS.items() if secret.encode() in content], path

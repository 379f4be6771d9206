"""What a user may have: finished runs in the working directory, files in the home directory, variables of a cluster."""

import json
from pathlib import Path

from gpt4d.config import CONFIG_DIR

VOCABULARY = 777  # of all planted runs
VARIABLES = {
    "HF_HOME": "/nowhere/hf",
    "HF_HUB_OFFLINE": "0",
    "HF_TOKEN": "secret",
    "WANDB_MODE": "online",
    "WANDB_API_KEY": "secret",
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "3",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "OMP_NUM_THREADS": "7",
    "HTTP_PROXY": "http://192.0.2.1:1",
    "HTTPS_PROXY": "http://192.0.2.1:1",
    "ALL_PROXY": "socks5://192.0.2.1:1",
    "TORCH_LOGS": "+all",
    "XDG_CACHE_HOME": "/nowhere/cache",
}


def plant_runs(directory: Path) -> Path:
    """Write a finished run under every default name of a run directory, with settings that no test has."""
    for model in CONFIG_DIR.glob("model/*.yaml"):
        for data in ("sotu", "blue_marble"):
            run = directory / "runs" / f"{model.stem}-{data}"
            checkpoint = run / "checkpoints" / "step_00000600"
            checkpoint.mkdir(parents=True)
            meta = {"step": 600, "model": {"name": model.stem, "vocab_size": VOCABULARY}}
            (checkpoint / "meta.json").write_text(json.dumps(meta))
            (run / "config.yaml").write_text(f"model: {{name: {model.stem}, vocab_size: {VOCABULARY}}}\n")
            (run / "metrics.jsonl").write_text(json.dumps({"step": 600, "loss": 1.0}) + "\n")
    (directory / "runs/cache/sotu").mkdir(parents=True)
    return directory


def plant_home(home: Path) -> Path:
    """Write settings, credentials and broken caches of the libraries into a home directory."""
    for name, text in {
        ".netrc": "machine api.wandb.ai login user password secret\n",
        ".config/wandb/settings": "[default]\nmode = online\n",
        ".config/matplotlib/matplotlibrc": "backend: no_such_backend\n",
        ".cache/huggingface/token": "secret",
        ".cache/huggingface/hub/models--gpt2/refs/main": "broken",
        ".cache/gpt4d/cluster.yaml": "broken: [",
        ".triton/cache/broken": "",
    }.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return home

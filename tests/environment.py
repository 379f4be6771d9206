"""The environment of the tests: no network and no GPU. A rank computes on one thread, as on a shared machine."""

import os

_CHANGES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
HIDDEN = {name: os.environ.get(name) for name in _CHANGES}  # original values, which only tests/gpu uses
os.environ.update(_CHANGES, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_SILENT="true")

"""The entry point: ``python train.py``, ``torchrun --nproc-per-node N train.py`` or ``srun python train.py``.

Arguments are Hydra overrides, such as ``model=gpt_125m parallel.gx=2``. ``--help`` explains the most important ones.
With ``-m``, overrides may have several values, and every combination is trained (gpt4d.training.sweep). ``--dry-run``
checks and predicts the run without starting it (gpt4d.training.dry_run).
"""

import sys

from gpt4d.runtime.signals import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # first, because the remaining imports take a second

    from gpt4d.config.commands import one_line_errors
    from gpt4d.training.run import main

    with one_line_errors():
        main(sys.argv[1:])

"""Faults at random in runs on many plans: every job ends with its cause, and no loss changes.

    python -m tests.soak [faults=100] [seconds=86400] [seed=0] [model=gpt] [plans=grid,stages]
        [out=benchmarks/results/soak.json]

``model=gpt_side_work`` reads a stream, is evaluated during the training, and has a tracker that fails.
``tests.soak.plans`` has the plans, ``tests.soak.faults`` the kinds of faults and the phases in which they strike.
"""

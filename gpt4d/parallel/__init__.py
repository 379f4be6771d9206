"""The grid of devices, the layout of tensors on it, and the layers that compute on shards.

- ``layout``, ``grid``, ``stage_plan``, ``stage``: where tensors and stages are.
- ``context``, ``sharded_weights``, ``gradient_reducer``: what layers use, and who communicates weights and gradients.
- ``engine``: when to prefetch, reduce and interleave. It does not import torch, and the planner executes it too.
- ``comm``: collectives and their statistics; ``comm.cpu`` is the transport between ranks without NCCL.
- ``layers``: a spec for each kind of layer, and beside each subject the kernels that implement it in torch.
- ``symbolic``: tensors without values, on which the planner runs the same layers.
- ``pipeline``, ``resharding``: schedules and their execution, and tensors that cross between meshes.
- ``atp``, ``compile``, ``random``: the ATP mode, torch.compile, and random numbers that do not depend on the grid.
"""

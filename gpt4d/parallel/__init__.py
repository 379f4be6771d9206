"""The grid of devices, the layout of tensors on it, and the layers that compute on shards.

- ``layout``, ``grid``, ``stage_plan``, ``stage``: where tensors and stages are.
- ``context``, ``sharded_weights``, ``gradient_reducer``: the settings and weights of layers, and the communication of
  weights and gradients.
- ``kernels``, ``functions``: kernels and functions with a gradient, from which layers are built.
- ``engine``: when to prefetch, reduce and interleave. It does not import torch, so that the planner can execute it.
- ``comm``: collectives and their statistics; ``comm.cpu`` is the transport between ranks without NCCL.
- ``layers``: a spec for each kind of layer, and its kernels, which import torch at their first use (``lazy``).
- ``symbolic``: tensors without values, on which the planner runs the same layers.
- ``pipeline``, ``resharding``: schedules and their execution, and tensors that cross between meshes.
- ``atp``, ``compile``, ``random``: the ATP mode, torch.compile, and random numbers that do not depend on the grid.
"""

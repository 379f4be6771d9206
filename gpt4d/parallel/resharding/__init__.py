"""Cross-mesh resharding: sends a tensor from one mesh to a disjoint mesh, where it has another layout.

``plan.plan`` returns a plan: unit tasks, senders and order (arXiv 2211.05322, §3). ``transfer`` executes it. Only
``transfer`` imports torch, so plans can be computed, printed and plotted on any laptop.
"""

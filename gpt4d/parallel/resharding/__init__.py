"""Cross-mesh resharding: a tensor laid out on one mesh appears on a disjoint one under another layout.

``planning.plan`` makes a value: unit tasks, who sends, in what order (arXiv 2211.05322, §3). ``transfer`` executes it.
No torch but in ``transfer``: a plan is made, printed and drawn on any laptop.
"""

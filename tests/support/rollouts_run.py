"""Run of rollouts with a small model, and what its tests share."""

from __future__ import annotations

RUN = """
name = "rollouts"
workload = "rollouts"
[model]
problems = "sorting"
size = 3
context = 14
answer = 4
n_layer = 1
n_head = 2
n_embd = 32
[task]
local_steps = 5
batch_size = 16
[train]
lr = 1e-2
[plan]
codec = "float32"
[task.options]
problems = 8
group = 16
slots = 64
reuse = 4
chunk = 8
window = 256
window_min = 8
queue = 64
warm_steps = 300
"""

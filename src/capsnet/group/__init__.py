"""Several processes that train or evaluate together, started by PyTorch's `torchrun`, on one machine or many.

All processes run the same program. `current()` is the group that this process belongs to; for a program that was not
started by torchrun it is a group of one, whose operations do nothing.

launch.py       what torchrun tells a process
base.py         the group of one, and which group is the current one
processes.py    the group of several: sums, gathers, agreement
gradients.py    gradients added over the processes while the backward pass still runs
watch.py        failures and missing processes, noticed through the store that all processes share
member.py       a process's part from start to end: join, work, and one message if something fails
"""

from __future__ import annotations

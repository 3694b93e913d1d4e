"""What the command line leaves out of PyTorch at start-up changes no result."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, torch
from capsnet.kernels.private import skip_compiler
from capsnet.routing.dynamic import DynamicRouting
if sys.argv[1] == "skip":
    skip_compiler()
torch.manual_seed(0)
weight = torch.nn.Parameter(0.1 * torch.randn(1152, 10, 16, 8))
optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
for _ in range(2):
    optimizer.zero_grad()
    DynamicRouting()(torch.randn(8, 1152, 8), weight).poses.square().sum().backward()
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
print(weight.double().sum().item(), "torch._dynamo" in sys.modules)
"""


def test_training_without_the_compiler_gives_the_same_bits_and_does_not_import_it() -> None:
    outputs = [
        subprocess.run([sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True).stdout.split()
        for word in ("skip", "keep")
    ]
    assert outputs[0][0] == outputs[1][0]
    assert [imported for _, imported in outputs] == ["False", "True"]

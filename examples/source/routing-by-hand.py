# %% [markdown]
# # Routing by hand
#
# Dynamic routing (Procedure 1 of the paper) with four lower capsules, two upper capsules and poses in the plane, so
# that every vector can be drawn. At the end the same votes go through the library's own routing.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import capsnet

# %% [markdown]
# ## Squash
#
# The length of a capsule should be a probability. `squash` keeps the direction of a vector and maps its length to
# $\|s\|^2 / (1 + \|s\|^2)$: short vectors almost vanish, long ones approach length 1.


# %%
def squash(s):
    squared = (s**2).sum(-1, keepdims=True)
    return squared / (1 + squared) * s / np.sqrt(squared + 1e-12)


length = np.linspace(0, 4, 100)
plt.figure(figsize=(4, 2.5))
plt.plot(length, length**2 / (1 + length**2))
plt.xlabel("length of s")
plt.ylabel("length of squash(s)")
plt.show()

# %% [markdown]
# ## Votes
#
# Each lower capsule $i$ predicts the pose of each upper capsule $j$: its vote $\hat u_{j|i}$. Here the first three
# votes for A agree, and the fourth points elsewhere. The votes for B disagree.

# %%
votes = np.array(  # (lower capsule, upper capsule, x and y)
    [
        [[0.9, 0.5], [0.8, -0.3]],
        [[1.0, 0.4], [-0.7, 0.5]],
        [[0.8, 0.6], [0.1, -0.9]],
        [[-0.6, 0.5], [-0.2, 0.8]],
    ]
)


def draw(axis, votes, couplings, output, title):
    for vote, c in zip(votes, couplings, strict=True):
        arrow = {"width": 0.01, "head_width": 0.06, "length_includes_head": True}
        axis.arrow(0, 0, *vote, color="tab:blue", alpha=0.15 + 0.85 * c, **arrow)
    size = np.linalg.norm(output)
    head = {"head_width": min(0.1, size), "head_length": min(0.15, size), "length_includes_head": True}
    axis.arrow(0, 0, *output, color="tab:orange", width=min(0.025, size / 4), **head)
    axis.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal", title=title, xticks=[], yticks=[])


# %% [markdown]
# ## Three iterations
#
# Logits $b_{ij}$ start at zero. In each iteration: $c_i = \mathrm{softmax}(b_i)$ over the upper capsules,
# $s_j = \sum_i c_{ij} \hat u_{j|i}$, $v_j = \mathrm{squash}(s_j)$, and then $b_{ij}$ grows by the agreement
# $\hat u_{j|i} \cdot v_j$. Blue arrows are votes, darker for a larger coupling; the orange arrow is the upper capsule.

# %%
b = np.zeros((4, 2))
figure, axes = plt.subplots(2, 3, figsize=(8, 5.4))
for t in range(3):
    c = np.exp(b) / np.exp(b).sum(1, keepdims=True)  # over the upper capsules
    s = (c[:, :, None] * votes).sum(0)
    v = squash(s)
    for j, name in enumerate("AB"):
        size = np.linalg.norm(v[j])
        draw(axes[j, t], votes[:, j], c[:, j], v[j], f"{name}, iteration {t + 1}: length {size:.2f}")
    b = b + (votes * v).sum(-1)
figure.tight_layout()
plt.show()
print("couplings of the last iteration (rows: lower capsules; columns: A, B)")
print(c.round(3))

# %% [markdown]
# The three agreeing votes make A long, so their capsules send more and more to A; the fourth turns to B. B stays short
# because its votes cancel.
#
# ## The same with the library
#
# `dynamic_routing` takes lower capsules and transformations. With one-dimensional capsules of value 1 the
# transformations are the votes.

# %%
routed = capsnet.dynamic_routing(torch.ones(1, 4, 1), torch.tensor(votes).float()[..., None], iterations=3)
print("largest difference:", float((routed.poses[0] - torch.from_numpy(v)).abs().max()))
assert torch.allclose(routed.poses[0].double(), torch.from_numpy(v), atol=1e-5)

# %% [markdown]
# Try other votes above: what happens if all four agree on B? In the Lab (`capsnet lab`), *By hand* lets you drag the
# votes and switch between all routing algorithms.

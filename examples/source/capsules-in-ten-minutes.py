# %% [markdown]
# # Capsules in ten minutes
#
# A capsule is a small vector. Its **length** says how likely something is present, its **direction** describes how it
# looks. This notebook looks into a trained capsule network: what it answers, how it decides, and what the sixteen
# numbers of a capsule mean.

# %%
import matplotlib.pyplot as plt
import torch

import capsnet
from capsnet import data

torch.set_num_threads(2)
model = capsnet.load("quick-mnist")
test = data.load("mnist").test
print(model.describe())

# %% [markdown]
# ## One vector per class
#
# The network has ten class capsules of sixteen dimensions. For a digit, the capsule of its class should be long and the
# others short. Unlike a softmax, the lengths need not sum to one: two digits at once, or none, are possible answers.

# %%
images = test.images[[0, 2, 4, 18]]
seen = model.predict(images, trace=True)
print("poses", tuple(seen.poses.shape), "activations", tuple(seen.activations.shape))

figure, axes = plt.subplots(2, 4, figsize=(9, 3.6), height_ratios=[1.2, 1])
for image, lengths, above, below in zip(images, seen.activations, *axes, strict=True):
    above.imshow(image[0], cmap="gray")
    above.axis("off")
    below.bar(range(10), lengths, color=["tab:orange" if j == lengths.argmax() else "tab:gray" for j in range(10)])
    below.set(xticks=range(10), ylim=(0, 1))
axes[1, 0].set_ylabel("length")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Routing by agreement
#
# Below the class capsules are 288 primary capsules: small vectors that describe parts of the image. Each one predicts
# the pose of every class (a *vote*). Routing sends a primary capsule to the classes on which its vote agrees with the
# others. The coupling coefficients start equal, at one tenth. After three iterations some of the primary capsules send
# most of their output to the 7, and the others are hardly decided.

# %%
couplings = seen.trace.couplings[:, 0]  # (iterations, 288 primary capsules, 10 classes) of the first digit
figure, axes = plt.subplots(1, len(couplings), figsize=(9, 3), sharey=True)
for t, (axis, c) in enumerate(zip(axes, couplings, strict=True), 1):
    axis.imshow(c, aspect="auto", vmin=0, vmax=0.5, cmap="magma", interpolation="nearest")
    axis.set(title=f"iteration {t}", xlabel="class", xticks=range(10))
axes[0].set_ylabel("primary capsule")
figure.tight_layout()
plt.show()
print("mean coupling to class 7:", [round(float(c[:, 7].mean()), 3) for c in couplings])

# %% [markdown]
# ## What a pose means
#
# A decoder draws the digit back from its pose alone. Changing one of the sixteen numbers changes one property of the
# digit: its slant, its thickness, the length of a stroke (Fig. 4 of the paper).

# %%
label = int(seen.labels[0])
tweaks = model.tweaks(seen.poses[0, label], label, span=0.25, steps=9)  # (16 dimensions, 9 steps, 1, 28, 28)
chosen = tweaks[:6].detach()
figure, axes = plt.subplots(6, 9, figsize=(6.3, 4.2))
for row, dimension in zip(axes, chosen, strict=True):
    for axis, image in zip(row, dimension, strict=True):
        axis.imshow(image[0], cmap="gray", vmin=0, vmax=1)
        axis.axis("off")
figure.suptitle("rows: dimensions 0 to 5 of the pose; columns: −0.25 to +0.25")
plt.show()

# %% [markdown]
# ## How good is it?
#
# Accuracy on the first 1,000 test digits. The error on all 10,000, with its confidence interval, is on the model's card
# (`capsnet models quick-mnist`).

# %%
some = test.images[:1000]
right = (model.predict(some).labels == test.labels[:1000]).float().mean()
print(f"{float(right):.1%} of 1,000 digits are right")

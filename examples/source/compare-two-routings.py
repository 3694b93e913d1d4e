# %% [markdown]
# # Compare two routings
#
# Does dynamic routing help, compared with uniform couplings? A fair comparison uses the same network, images and seeds
# for both and looks at paired differences. This one is small, so that it runs in two minutes; `capsnet ablate` and
# `capsnet reproduce arena` do it at full size.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from capsnet.sklearn import CapsNetClassifier

images, labels = load_digits(return_X_y=True)  # 1,797 digits of 8×8 pixels
print(images.shape, "pixels from", images.min(), "to", images.max())

# %% [markdown]
# ## The same seeds for both
#
# Each seed draws its own 200 training digits and 800 others to judge by, and the initial weights. Both routings get the
# same ones.

# %%
routings, seeds = ("dynamic", "uniform"), range(4)
accuracy = {routing: [] for routing in routings}
for seed in seeds:
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, train_size=200, test_size=800, random_state=seed, stratify=labels
    )
    for routing in routings:
        classifier = CapsNetClassifier(routing=routing, epochs=8, random_state=seed).fit(train_x, train_y)
        accuracy[routing].append(classifier.score(test_x, test_y))
    print(f"seed {seed}: " + ", ".join(f"{routing} {accuracy[routing][-1]:.1%}" for routing in routings))

# %% [markdown]
# ## Paired differences
#
# The seeds differ more than the routings do, which is why only the difference within a seed counts. Student's interval
# of the mean says what four seeds can tell.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
for pair in zip(*accuracy.values(), strict=True):
    left.plot([0, 1], pair, "o-", color="tab:gray")
left.set(xticks=[0, 1], xticklabels=routings, ylabel="accuracy", xlim=(-0.3, 1.3), title="one line per seed")

differences = 100 * (np.array(accuracy["dynamic"]) - np.array(accuracy["uniform"]))
student = 3.182  # 97.5 % quantile of Student's t with three degrees of freedom
mean, half = differences.mean(), student * differences.std(ddof=1) / np.sqrt(len(differences))
right.errorbar([0], [mean], [half], fmt="o", capsize=6, color="tab:orange")
right.plot(np.zeros(len(differences)), differences, ".", color="tab:gray")
right.axhline(0, color="black", linewidth=0.8)
right.set(xticks=[], ylabel="percentage points", title="dynamic minus uniform, 95 % interval")
figure.tight_layout()
plt.show()
print(f"dynamic minus uniform: {mean:+.2f} ± {half:.2f} percentage points")

# %% [markdown]
# If the interval contains zero, these runs do not show a difference. More seeds narrow it. The settings were not tuned
# for either routing, and the digits that judge here should not be used to choose settings afterwards.

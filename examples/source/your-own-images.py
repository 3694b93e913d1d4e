# %% [markdown]
# # Your own images
#
# A capsule network for a folder with one subfolder per class. Here the images are drawn by a few lines of code; replace
# `shapes` by a folder of your own.

# %%
import json
import os
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image, ImageDraw

import capsnet
from capsnet.cli import main
from capsnet.data import fit, read_image

os.chdir(tempfile.mkdtemp())  # a place to play in
shapes, run = Path("shapes"), Path("runs/shapes")

# %% [markdown]
# ## A folder of images
#
# 80 images per class in random colours, sizes and positions.

# %%
random.seed(0)
for name in ("disc", "square", "triangle"):
    (shapes / name).mkdir(parents=True)
    for n in range(80):
        picture = Image.new("RGB", (32, 32))
        x, y, r = random.randint(10, 21), random.randint(10, 21), random.randint(5, 9)
        corners = {"square": [(-1, -1), (1, -1), (1, 1), (-1, 1)], "triangle": [(0, -1), (1, 1), (-1, 1)]}.get(name)
        colour = tuple(random.randint(90, 255) for _ in range(3))
        pen = ImageDraw.Draw(picture)
        if corners:
            pen.polygon([(x + r * a, y + r * b) for a, b in corners], fill=colour)
        else:
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        picture.save(shapes / name / f"{n}.png")

samples = [shapes / name / f"{n}.png" for name in ("disc", "square", "triangle") for n in range(4)]
figure, axes = plt.subplots(2, 6, figsize=(7, 2.5))
for axis, path in zip(axes.flat, samples, strict=True):
    axis.imshow(Image.open(path))
    axis.set_title(path.parent.name, fontsize=9)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## Train
#
# This is `capsnet train --data folder:shapes --epochs 6 --out runs/shapes` on the command line. The images are split
# 80/10/10 by the seed. For photographs, `--init quick-mnist` starts from trained weights.

# %%
flags = ["--epochs", "6", "--lr", "0.003", "--device", "cpu", "--out", str(run)]
assert main(["train", "--data", f"folder:{shapes}", *flags]) == 0

# %% [markdown]
# ## Test error and learning curve
#
# The test images were used once, after the last step.

# %%
test = json.loads((run / "results.json").read_text())["test"]
low, high = test["error_percent_interval_95"]
print(f"{test['errors']} of {test['n']} test images wrong; 95 % interval of the error: {low:.1f} to {high:.1f} %")
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = [record for record in records if record["kind"] == "train"]
plt.figure(figsize=(5, 2.5))
plt.plot([record["step"] for record in steps], [record["loss"] for record in steps])
plt.xlabel("step")
plt.ylabel("loss")
plt.show()

# %% [markdown]
# ## Predict and reconstruct
#
# `capsnet.load` opens the run. The decoder draws each image again from the capsule of its class. After this short
# training it only knows roughly where the light is; details need a longer one (`--epochs`).

# %%
model = capsnet.load(run)
channels, height, width = model.config.image_shape
images = [fit(read_image(path), channels, height, width) for path in samples]
figure, axes = plt.subplots(2, 12, figsize=(9, 2))
for image, above, below in zip(images, *axes, strict=True):
    seen = model.predict(image)
    above.imshow(image.permute(1, 2, 0))
    above.set_title(model.classes[seen.labels[0]], fontsize=8)
    below.imshow(seen.reconstructions[0].permute(1, 2, 0))
    above.axis("off")
    below.axis("off")
plt.show()

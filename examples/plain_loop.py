"""A capsule network in a plain PyTorch loop, with a DataLoader of your own. Run it with `python plain_loop.py`."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from capsnet import create_model, data, margin_loss, reconstruction_loss

splits = data.load("mnist", train_limit=2000)  # or any dataset of (image in [0, 1], label) pairs
train, test = (TensorDataset(part.images[:2000] / 255, part.labels[:2000]) for part in (splits.train, splits.test))
torch.manual_seed(0)
model = create_model("quick", num_classes=10, image_size=28, in_chans=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

for epoch in range(2):
    model.train()
    for images, labels in DataLoader(train, batch_size=50, shuffle=True):
        targets = torch.nn.functional.one_hot(labels, 10).float()
        output = model(images)  # activations (b, 10) are the lengths of the poses (b, 10, 16)
        rebuilt = model.reconstruct(output.poses, labels)  # decoded from the true class
        loss = margin_loss(output.activations, targets) + 0.0005 * reconstruction_loss(rebuilt, images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(x).activations.argmax(1) == y).sum().item() for x, y in DataLoader(test, batch_size=250))
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {right / len(test):.3f}")

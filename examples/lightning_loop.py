"""A capsule network built from layers, trained by Lightning. Run it with `python lightning_loop.py`."""

import lightning
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from capsnet import Decoder, DenseCaps, PrimaryCaps, data, lengths, margin_loss, reconstruction_loss


class Capsules(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 9, stride=2), nn.BatchNorm2d(32), nn.ReLU())  # (b, 32, 10, 10)
        self.primary = PrimaryCaps(32, types=8, dim=8, kernel_size=5)  # (b, 72, 8)
        self.caps = DenseCaps(72, 8, 10, 16, routing="dynamic", iterations=3)  # (b, 10, 16)
        self.decoder = Decoder(10, 16, (1, 28, 28))

    def forward(self, images):
        return self.caps(self.primary(self.stem(images)))

    def training_step(self, batch):
        images, labels = batch
        poses, targets = self(images), nn.functional.one_hot(labels, 10).float()
        rebuilt = self.decoder(poses * targets[:, :, None])
        return margin_loss(lengths(poses), targets) + 0.0005 * reconstruction_loss(rebuilt, images)

    def test_step(self, batch):
        images, labels = batch
        self.log("test accuracy", (lengths(self(images)).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), lr=0.003)


lightning.seed_everything(0)
splits = data.load("mnist", train_limit=2000)
train, test = (TensorDataset(part.images[:2000] / 255, part.labels[:2000]) for part in (splits.train, splits.test))
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(model := Capsules(), DataLoader(train, batch_size=50, shuffle=True))
trainer.test(model, DataLoader(test, batch_size=250))

"""Trains by Lightning, with clipped gradients and a checkpoint. Comments say what `gapless san` finds in each line."""

import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        if loss.item() > 1e9:  # loop: host-read
            raise ValueError("the loss grows")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cuda", devices=1, max_epochs=1, gradient_clip_val=1.0, default_root_dir=folder, **quiet
    )
    data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=8)
    trainer.fit(Model(), data)  # fit
print("done")

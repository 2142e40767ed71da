"""Trains by Lightning: mixed precision, clipped gradients, workers that load, checkpoints.

A comment says what `gapless san` finds in the line of the program; the rest is Lightning's own, at the line of the fit.
"""

import os
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


def main() -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cuda", devices=1, max_epochs=2, gradient_clip_val=1.0, precision="16-mixed",
            default_root_dir=folder, enable_checkpointing=True, **quiet,
        )  # fmt: skip
        rows = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
        trainer.fit(Model(), DataLoader(rows, batch_size=8, num_workers=2, pin_memory=True))  # fit
        assert os.path.exists(trainer.checkpoint_callback.best_model_path)


if __name__ == "__main__":
    main()
    print("done")

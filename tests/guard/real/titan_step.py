"""Train torchtitan's debug model for three steps with torchtitan's own trainer."""

import os
import tempfile
from dataclasses import dataclass, replace

import torch
from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

device = "cuda"
STEPS = 3


class Letters(BaseTokenizer):
    """A tokenizer whose tokens are the bytes of a text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [*text.encode(), *([0] if add_eos else [])]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def texts(path: str) -> Dataset:
    return Dataset.from_dict({"text": [f"line {number} of a small text" for number in range(200)]})


DATASETS["letters"] = DatasetConfig(path="", loader=texts, sample_processor=lambda sample: sample["text"])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = llama3_debugmodel()
        # Without FSDP, on one device; its own attention is compiled for a GPU alone.
        config.model_spec = replace(config.model_spec, parallelize_fn=lambda model, **options: model)
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.tokenizer, config.dataloader = Letters.Config(), HuggingFaceTextDataLoader.Config(dataset="letters")
        config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, STEPS
        config.training.disable_cuda_graphs = True
        config.validator.enable, config.dump_folder = False, folder
        trainer = config.build()  # set-up
        batches = trainer.batch_generator(trainer.dataloader)
        for trainer.step in range(1, STEPS + 1):
            trainer.train_step(batches)  # step
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    main()
    print("done")

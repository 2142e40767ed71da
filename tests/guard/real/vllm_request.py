"""Serve one request with vLLM's CPU build, and mark the tensors that would be on the device with a GPU.

In the CPU build both halves of vLLM's pairs of buffers, the host's and the device's, are one tensor. This program makes
them two, and every tensor that is not a host's half counts as a device tensor. Waits within `gpu_sync_allowed`, vLLM's
own mark for intended waits, are allowed. The argument is the folder of a model.
"""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
)  # fmt: skip

import torch
import vllm.utils.gpu_sync_debug as debug

from gapless import guard

entered: Counter[str] = Counter()


@contextlib.contextmanager
def allowed(first_only: bool = False) -> Iterator[None]:
    entered[sys._getframe(2).f_code.co_name] += 1
    with guard.allow("vLLM allows it: gpu_sync_allowed"):
        yield


debug.gpu_sync_allowed = allowed  # before the modules that take it by name

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.utils import CpuGpuBuffer  # noqa: E402


def split(owner: object) -> Iterator[torch.Tensor]:
    """Give the device's half of each pair of buffers memory of its own, and yield the host's half."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, CpuGpuBuffer):
            value.gpu = value.cpu.clone()
            yield value.cpu
        elif isinstance(value, torch.Tensor) and "cpu" in name:
            device = name.removesuffix("_cpu_tensor")
            if isinstance(getattr(owner, device, None), torch.Tensor) and device != name:
                setattr(owner, device, value.clone())
            yield value


llm = LLM(
    sys.argv[1], max_model_len=256, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True,
    distributed_executor_backend="uni", dtype="float32",
)  # fmt: skip
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
batch = runner.input_batch
on_host = [tensor for owner in (runner, batch, *batch.block_table.block_tables) for tensor in split(owner)]
places = {tensor.untyped_storage().data_ptr() for tensor in on_host}
entered.clear()
params = SamplingParams(temperature=0.8, logprobs=2, max_tokens=8, ignore_eos=True)
with guard.no_sync(
    device_tensors=lambda tensor: tensor.untyped_storage().data_ptr() not in places, pinned=on_host, mode="record"
):
    made = llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], params, use_tqdm=False)
print(len(made[0].outputs[0].token_ids), "tokens; allowed:", *sorted(entered.items()), "done")

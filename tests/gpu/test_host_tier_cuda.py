"""The host tier on a GPU: pages go to registered memory of the host and come back, and tokens stay the same."""

from __future__ import annotations

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.base.shared import SharedMemory, mapped
from gapless.device import CudaDevice
from gapless.pace.load_gate import LoadGate


def test_memory_of_a_peer_is_read_by_kernels_where_it_is() -> None:
    from gapless.kernels import all_triton
    from gapless.offload.transfers import writable

    memory = SharedMemory(6 * 3 << 12)
    pages = torch.randint(-(2**31), 2**31, (6, 3 << 10), dtype=torch.int32)
    torch.from_numpy(memory.data).view(torch.int32).copy_(pages.flatten())
    device, data = CudaDevice(), mapped(memory.fd)
    close = device.adopt(data)
    assert close is not None, "this GPU cannot read memory that is mapped to be read only"
    src, dst = torch.from_numpy(writable(data)).view(torch.int32).view(6, -1), torch.zeros_like(pages, device="cuda")
    sums = torch.zeros(3, dtype=torch.int64, device="cuda")
    places = torch.tensor([[4, 0, 5], [1, 2, 0]], dtype=torch.int32).pin_memory()
    all_triton.TRITON_KERNELS.copy_pages(src, dst, places, sums)
    assert torch.equal(dst[[1, 2, 0]].cpu(), pages[[4, 0, 5]])
    close()
    memory.close()
    device.close()


@pytest.mark.parametrize("device", ["cuda", "accelerator:cuda"])
@pytest.mark.parametrize("depth", ["1", "8", "auto"])
def test_prompts_that_the_device_gave_up_are_loaded(device: str, depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small a model computes them in about the time of a load, and which is longer changes with what runs beside.
    monkeypatch.setattr(LoadGate, "pays", lambda *_: True)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    prompts = [word + "The quick brown fox jumps over the lazy dog near the river bank. " * 10 for word in "abcd"]
    options = {"device": device, "dtype": "float32", "depth": depth, "max_model_len": 512}
    found = []
    for tiers in ((), ("host:64MiB",)):
        with LLM("demo", num_gpu_blocks_override=40, kv_tiers=tiers, **options) as llm:
            rounds = [llm.generate(prompt, greedy, use_tqdm=False)[0] for prompt in prompts * 2]
        found.append([output.outputs[0].token_ids for output in rounds])
    assert found[0] == found[1]
    assert all(output.num_cached_tokens > 256 for output in rounds[4:])

"""What programs ask of torch.cuda in their set-up, over an emulated device: right answers, or one sentence."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gapless import guard
from gapless.guard.detectors import Detectors
from gapless.guard.emulate import emulated_cuda
from gapless.guard.refusals import NotEmulatedError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


@pytest.fixture
def region():
    with emulated_cuda(), guard.no_sync(mode="record") as region:
        yield region


def rules(region) -> list[str]:
    return [finding.rule for finding in region.report.findings]


def test_generators_of_the_device_draw_the_same_again(region):
    drawn = []
    for _ in range(2):
        generator = torch.Generator(device="cuda")
        generator.manual_seed(3)
        drawn.append(torch.rand(4, device="cuda", generator=generator))
    assert torch.equal(*drawn) and drawn[0].is_cuda
    assert generator.device == torch.device("cuda:0") and generator.initial_seed() == 3
    assert torch.Generator().device == torch.device("cpu")
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    state = generator.get_state()
    first = torch.rand(4, device="cuda", generator=generator)
    generator.set_state(state)
    assert torch.rand(4, device="cuda", generator=generator).tolist() == first.tolist()


def test_states_of_random_numbers_are_kept_and_restored(region):
    torch.cuda.manual_seed(5)
    state, states = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()
    first = torch.rand(3, device="cuda").tolist()
    for restore in (lambda: torch.cuda.set_rng_state(state), lambda: torch.cuda.random.set_rng_state_all(states)):
        restore()
        assert torch.rand(3, device="cuda").tolist() == first
    torch.cuda.manual_seed(5)
    for devices in (None, [0]):
        with torch.random.fork_rng(devices):
            torch.rand(3, device="cuda")
    assert torch.rand(3, device="cuda").tolist() == first
    assert torch.cuda.initial_seed() == 5 and len(torch.cuda.default_generators) == 1


def test_properties_and_memory_agree_with_each_other(region):
    properties = torch.cuda.get_device_properties("cuda")
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == properties.total_memory == torch.cuda.memory.mem_get_info()[1]
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
    assert properties.name == torch.cuda.get_device_name() and properties.multi_processor_count >= 1
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_reserved() == 0 and torch.cuda.memory_stats()["num_ooms"] == 0
    assert isinstance(torch.cuda.memory_summary(), str)
    low, high = torch.cuda.Stream.priority_range()
    assert torch.cuda.Stream(priority=high).priority == high < low
    assert torch.cuda.ExternalStream(7).cuda_stream == 7


def test_the_accelerator_is_the_emulated_device(region):
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    torch.accelerator.set_device_index(0)
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.accelerator.current_stream() == stream
    torch.accelerator.synchronize()
    assert rules(region) == ["stream-wait"]


def test_a_tensor_of_the_device_says_so_everywhere(region):
    x, host = torch.zeros(3, device="cuda"), torch.zeros(3)
    assert (x.get_device(), torch.get_device(x), x.is_cuda, x.is_cpu) == (0, 0, True, False)
    assert (host.get_device(), host.is_cuda, host.is_cpu) == (-1, False, True)


def test_a_default_device_holds_on_its_thread_until_it_is_taken_back(region):
    torch.set_default_device("cuda")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_default_device()))
    thread.start()
    thread.join()
    assert torch.zeros(3).is_cuda and torch.nn.Linear(2, 2).weight.is_cuda and seen == [torch.device("cpu")]
    assert torch.get_default_device() == torch.device("cuda:0")
    with torch.device("cpu"):
        assert not torch.zeros(3).is_cuda and torch.get_default_device() == torch.device("cpu")
    torch.set_default_device("cpu")
    assert not torch.zeros(3).is_cuda
    torch.set_default_device(None)
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
    assert rules(region) == []


@pytest.mark.parametrize(
    "place", ["cuda", torch.device("cuda:0"), {"cpu": "cuda:0"}, lambda storage, _: storage.cuda()]
)
def test_loaded_weights_lie_on_the_device_they_are_mapped_to(region, tmp_path, place):
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", map_location=place)["w"]
    assert loaded.is_cuda and loaded.tolist() == [1, 1, 1]


def test_saved_weights_of_the_device_are_loaded_there(region, tmp_path):
    torch.save(torch.ones(3, device="cuda"), tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt").is_cuda and not torch.load(tmp_path / "w.pt", map_location="cpu").is_cuda
    assert "upload" in rules(region)


def test_ranges_and_marks_of_profilers_are_taken(region):
    assert torch.cuda.nvtx.range_push("step") == 0
    torch.cuda.nvtx.mark("here")
    assert torch.cuda.nvtx.range_pop() == 0
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("other"))
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()


REFUSED = {
    "torch.cuda.temperature": lambda: torch.cuda.temperature(),
    "torch.cuda.MemPool": lambda: torch.cuda.MemPool(),
    "torch.cuda.cudart().cudaStreamCreate": lambda: torch.cuda.cudart().cudaStreamCreate(0),
    "torch.cuda.memory.get_allocator_backend": lambda: torch.cuda.get_allocator_backend(),
    "torch.cuda.nccl.unique_id": lambda: torch.cuda.nccl.unique_id(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_is_not_emulated_ends_with_one_sentence(region, name):
    with pytest.raises(NotEmulatedError) as refused:
        REFUSED[name]()
    assert str(refused.value) == f"not emulated: {name}"


@pytest.mark.parametrize(
    "name", ["set_device", "set_sync_debug_mode", "set_per_process_memory_fraction", "can_device_access_peer"]
)
def test_a_function_without_its_arguments_raises_as_it_does_with_a_device(region, name):
    with pytest.raises(TypeError):
        getattr(torch.cuda, name)()


def test_a_stream_of_a_thread_that_outlives_the_emulation_goes_on():
    inside, leave, failed = threading.Event(), threading.Event(), []

    def work():
        stream, other, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
        try:
            with torch.cuda.stream(stream):
                inside.set()
                leave.wait(20)
            stream.record_event(event)
            stream.wait_stream(other)
            stream.record_event()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    with Detectors(["sync", "race"], emulate_cuda=True):
        thread.start()
        assert inside.wait(20)
    leave.set()
    thread.join(20)
    assert not failed


def test_a_tensor_outside_of_the_checked_threads_is_refused_with_its_place():
    with emulated_cuda(), pytest.raises(NotEmulatedError, match=r"outside of the checked threads at .*test_emulated"):
        torch.zeros(2, device="cuda")


def test_a_loop_over_pinned_batches_is_right():
    """The most common correct loop: batches of a DataLoader that pins, copied without a wait."""
    detectors = Detectors(["sync", "race"], emulate_cuda=True)
    with detectors:
        rows = TensorDataset(torch.arange(32.0).reshape(16, 2))
        total = torch.zeros(2, device="cuda")
        for (batch,) in DataLoader(rows, batch_size=4, pin_memory=True):
            assert batch.is_pinned()
            total += batch.to("cuda", non_blocking=True).sum(0)
    assert detectors.findings() == []


def test_copies_of_no_elements_do_not_wait(region):
    x = torch.tensor([], device="cuda")
    torch.empty(0).to("cuda").cpu()
    torch.zeros(0, 3, device="cuda").copy_(torch.zeros(0, 3))
    torch.as_tensor([[], []], device="cuda")
    assert x.new_tensor([]).tolist() == [] and torch.ones(2, device="cuda")[[]].numpy().size == 0
    assert rules(region) == []
    torch.tensor([1.0], device="cuda")
    assert rules(region) == ["list-to-device"]


def test_a_state_of_random_numbers_has_the_16_bytes_of_a_gpus_and_another_offset_is_another_state(region):
    state = torch.cuda.get_rng_state()
    assert state.numel() == 16
    first = torch.rand(3, device="cuda").tolist()
    later = state.clone()
    later[8] += 40
    draws = []
    for _ in range(2):
        torch.cuda.set_rng_state(later)
        draws.append(torch.rand(3, device="cuda").tolist())
    assert draws[0] == draws[1] != first

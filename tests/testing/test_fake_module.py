"""What programs for a GPU expect of torch.fake: its module, tensors that are loaded, random numbers, convolutions."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.base.errors import ConfigError
from gapless.testing import fake

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    fake.load()
    torch.manual_seed(0)
    yield
    fake.hold(False)
    fake.delays(None)
    fake.synchronize()


def test_streams_and_events_of_the_module_are_those_of_torch() -> None:
    module = torch.get_device_module("fake")
    side, done = module.Stream(), module.Event(enable_timing=True)
    with module.device(0), module.stream(side), module.stream(None):
        assert module.current_stream() == side == torch.accelerator.current_stream()
        done.record()
    assert module.current_stream() == module.default_stream() != side
    module.set_stream(side)
    module.set_stream(module.default_stream())
    module.synchronize("fake:0")
    assert done.query() and isinstance(side, torch.Stream)


def test_the_module_counts_memory_as_torch_s_accelerator_does() -> None:
    torch.fake.empty_cache()
    x = torch.ones(1 << 20).fake()
    assert x.is_fake and torch.fake.memory_allocated() == torch.accelerator.memory_allocated() >= 4 << 20
    free, total = torch.fake.mem_get_info()
    assert free < total == torch.fake.get_device_properties(0).total_memory
    assert torch.nn.Linear(2, 2).fake()(torch.ones(1, 2).fake()).is_fake


def test_a_name_that_the_module_lacks_is_named() -> None:
    with pytest.raises(AttributeError, match=r"torch\.fake has no get_arch_list"):
        torch.fake.get_arch_list()


@pytest.mark.parametrize("device", ["cuda:0", "cpu", "fake:1", 1])
def test_another_device_is_refused(device: Any) -> None:
    for call in (fake.set_device, fake.device):
        with pytest.raises(ConfigError, match="there is one fake device, fake:0, and no "):
            call(device)


ELSEWHERE: dict[str, Callable[[], object]] = {
    "ones": lambda: torch.ones(1, device="fake:1"),
    "empty_strided": lambda: torch.empty_strided((1,), (1,), device="fake:1"),
    "eye": lambda: torch.eye(2, device="fake:1"), "tril_indices": lambda: torch.tril_indices(2, 2, device="fake:1"),
    "to": lambda: torch.ones(1).to("fake:1"), "like": lambda: torch.zeros_like(torch.ones(1), device="fake:1"),
    "tensor": lambda: torch.tensor([1], device="fake:1"), "fake": lambda: torch.ones(1).fake(1),
    "stream": lambda: torch.Stream("fake:1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_nothing_is_made_on_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(RuntimeError, match="there is one fake device, fake:0, and no fake:1"):
        ELSEWHERE[name]()


LOADED: dict[str, Callable[[bytes], Any]] = {
    "as it was": lambda saved: torch.load(io.BytesIO(saved)),
    "fake": lambda saved: torch.load(io.BytesIO(saved), map_location="fake"),
    "fake:0": lambda saved: torch.load(io.BytesIO(saved), map_location=torch.device("fake", 0)),
    "cpu": lambda saved: torch.load(io.BytesIO(saved), map_location="cpu"),
    "all types": lambda saved: torch.load(io.BytesIO(saved), weights_only=False),
}


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("saved_on", ["fake", "cpu"])
def test_a_checkpoint_comes_back_on_the_device_that_was_asked_for(name: str, saved_on: str) -> None:
    x, file = torch.arange(4.0, device=saved_on), io.BytesIO()
    torch.save({"whole": x, "part": x[1:3], "p": torch.nn.Parameter(x)}, file)
    found = LOADED[name](file.getvalue())
    device = name[:4] if name in ("cpu", "fake", "fake:0") else saved_on
    assert {one.device.type for one in found.values()} == {device}
    found["whole"][2] = 9
    assert found["part"].tolist() == [1, 9] and found["p"].requires_grad


def test_a_tensor_survives_a_pickle() -> None:
    found = pickle.loads(pickle.dumps(torch.arange(3, device="fake")))
    assert found.is_fake and found.tolist() == [0, 1, 2]


def convolved(device: str, dims: int, transposed: bool, bias: bool) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(1)
    shapes = (2, 4, *[8] * dims), (4, 2, *[3] * dims), (4,)
    given = [torch.randn(shape, generator=drawn).to(device).requires_grad_() for shape in shapes[: 2 + bias]]
    function = getattr(F, f"conv{'_transpose' * transposed}{dims}d")
    result = function(*given, stride=2, padding=1, groups=2)
    result.square().sum().backward()
    return [result.detach().cpu(), *(one.grad.cpu() for one in given)]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_and_its_gradients_are_those_of_the_cpu(dims: int, transposed: bool, bias: bool) -> None:
    for one, other in zip(*(convolved(device, dims, transposed, bias) for device in ("cpu", "fake")), strict=True):
        torch.testing.assert_close(one, other)


DRAWN: dict[str, Callable[[], Tensor]] = {
    "randn": lambda: torch.randn(8, device="fake"), "randint": lambda: torch.randint(99, (8,), device="fake"),
    "randperm": lambda: torch.randperm(50, device="fake"), "dropout": lambda: F.dropout(torch.ones(90, device="fake")),
    "multinomial": lambda: torch.multinomial(torch.ones(50, device="fake"), 9),
    "exponential_": lambda: torch.empty(8, device="fake").exponential_(),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_follow_from_the_seed_however_late_the_stream_is(name: str) -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(5)
        first = DRAWN[name]()
        host = torch.rand(3)  # other numbers than the device's
        second = DRAWN[name]()
        torch.manual_seed(6)  # changes nothing that was launched before
        return [first.cpu(), host, second.cpu()]

    wanted = drawn()
    fake.delays(1, lazy=True)
    for one, other in zip(wanted, drawn(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(wanted[0], wanted[2])


def test_a_generator_belongs_to_its_device() -> None:
    own = torch.Generator("fake").manual_seed(3)
    assert own.device == torch.device("fake", 0)
    before = torch.fake.get_rng_state()
    twins = [torch.rand(4, device="fake", generator=one).tolist() for one in (own.clone_state(), own)]
    assert twins[0] == twins[1] and torch.equal(before, torch.fake.get_rng_state())
    with pytest.raises(RuntimeError, match="Expected a 'fake' device type for generator but found 'cpu'"):
        torch.rand(4, device="fake", generator=torch.Generator())


def test_the_state_of_random_numbers_is_kept_and_restored() -> None:
    with torch.random.fork_rng(device_type="fake"):
        first = torch.rand(4, device="fake")
    assert torch.equal(first, torch.rand(4, device="fake"))

"""What torch has beside torch.cuda, over an emulated device: graphs, compiled functions, autocast, types of tensors,
process groups; and what errors say that come of the absence of CUDA."""

from __future__ import annotations

import pytest
import torch
from sharpest import sharpest
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import flex_attention

from gapless import guard
from gapless.guard import run
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


def checked(program) -> list[tuple[str, int]]:
    """Run it under all detectors; returns what was found: rules and lines, counted from that of the function."""
    detectors = Detectors(["sync", "race"], emulate_cuda=True)
    with detectors:
        program()
    first = program.__code__.co_firstlineno
    return [(entry.finding.rule, entry.finding.user.line - first) for entry in detectors.findings()]


@pytest.mark.usefixtures("region")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_texts_of_emulated_tensors_end_with_their_device():
    x, host = torch.ones(2, device="cuda", requires_grad=True), torch.ones(2)
    assert repr(x) == "tensor([1., 1.], device='cuda:0', requires_grad=True)"
    assert str(x.detach().half()) == "tensor([1., 1.], device='cuda:0', dtype=torch.float16)"
    assert f"{torch.nn.Parameter(x)}".endswith("\ntensor([1., 1.], device='cuda:0', requires_grad=True)")
    assert repr(x[:0].detach().reshape(0, 2)) == "tensor([], device='cuda:0', size=(0, 2))"
    assert repr([host, x.detach()]) == "[tensor([1., 1.]), tensor([1., 1.], device='cuda:0')]"
    assert repr(x.detach().cpu()) == "tensor([1., 1.])" and f"{x.sum()}" == "2.0"


def test_a_replay_does_again_what_was_captured():
    def program():
        x, total = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            y = x * 2 + 1
            pair = y.view(2, 2)[1]
            total.add_(y)
            most, at = y.max(0)
        assert not torch.cuda.is_current_stream_capturing()
        for step in range(3):
            x.copy_(torch.arange(4, device="cuda") * step)
            graph.replay()
            seen.append([one.clone() for one in (y, pair, most, at, total)])

    seen: list[list[torch.Tensor]] = []
    assert checked(program) == [("graph-capture", 3)], "one cause, one finding; a replay waits for nothing"
    expected = torch.ones(4)  # of the capture itself, which runs here
    for step, (y, pair, most, at, total) in enumerate(seen):
        now = torch.arange(4.0) * step * 2 + 1
        expected = expected + now
        assert y.equal(now) and pair.equal(now[2:]) and total.equal(expected)
        assert most.item() == now.max() and at.item() == now.argmax()


def test_a_replay_is_an_access_of_the_stream_that_it_is_given_to():
    def program():
        x, side, graph = torch.zeros(4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        graph.capture_begin()
        x.add_(1)
        graph.capture_end()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        graph.replay()

    assert checked(program) == [("graph-capture", 2), ("race", 8)]


@pytest.mark.filterwarnings("ignore:.*script_method")
@pytest.mark.parametrize("backend", sharpest(["eager", "aot_eager", "inductor"]))
def test_compiled_functions_run_uncompiled_and_are_seen(backend):
    def program():
        layer = torch.nn.Linear(4, 4, device="cuda")
        model = torch.compile(layer, backend=backend)
        step = torch.compile(lambda x: model(x).relu().sum(), backend=backend, fullgraph=True)
        loss = step(torch.ones(2, 4, device="cuda"))
        loss.backward()
        assert loss.is_cuda and layer.weight.grad.is_cuda
        loss.item()

    assert checked(program) == [("host-read", 7)]


def test_autocast_of_the_device_changes_types_there(region):
    a, layer = torch.ones(2, 2, device="cuda"), torch.nn.Linear(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (a @ a).dtype is layer(a).dtype is torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert (a @ a).dtype is torch.float32
        assert (a @ a).dtype is torch.bfloat16 and torch.is_autocast_enabled("cuda")
    assert (a @ a).dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    with torch.amp.autocast("cuda"):
        assert (a @ a).dtype is torch.float16
    assert rules(region) == []


def test_types_of_tensors_name_the_device(region):
    made = torch.cuda.FloatTensor(2, 3)
    assert made.shape == (2, 3) and made.is_cuda and made.type() == "torch.cuda.FloatTensor"
    assert isinstance(made, torch.cuda.FloatTensor) and not isinstance(made, torch.cuda.HalfTensor)
    assert not isinstance(torch.ones(2), torch.cuda.FloatTensor) and torch.ones(2).type() == "torch.FloatTensor"
    assert rules(region) == []
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert torch.ones(2).type(torch.cuda.HalfTensor).dtype is torch.float16
    assert rules(region) == ["list-to-device", "host-read", "upload"]


def test_a_default_type_of_the_device_puts_tensors_there(region):
    with pytest.warns(UserWarning, match="deprecated"):
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        assert torch.ones(2).is_cuda
        torch.set_default_tensor_type(torch.FloatTensor)
    assert not torch.ones(2).is_cuda


def test_nccl_is_played_by_gloo(region, tmp_path):
    groups = torch.distributed
    (tmp_path / "nccl").mkdir()
    groups.init_process_group(
        "nccl", f"file://{tmp_path}/nccl/store", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        x = torch.ones(2, device="cuda")
        groups.all_reduce(x)
        groups.broadcast(x, 0, group=groups.new_group([0], backend="nccl"))
        assert groups.is_nccl_available() and x.is_cuda
    finally:
        groups.destroy_process_group()
    assert rules(region) == []


def test_data_parallel_runs_over_the_one_device(region):
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2, device="cuda"))
    assert model(torch.ones(4, 2, device="cuda")).is_cuda


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_operators_whose_arguments_are_functions():
    def program():
        q = torch.ones(1, 2, 128, 16, device="cuda")
        assert flex_attention(q, q, q).is_cuda

    assert checked(program) == []


@pytest.mark.parametrize("backend", sharpest(["eager", "inductor"]))
def test_the_compiler_leaves_the_checkers_own_code_alone(backend):
    """Where a region begins after something was compiled; without that, nothing in it would be found."""
    step = torch.compile(lambda x: x.relu() + 1, backend=backend)
    x = guard.device_tensor(torch.ones(4))
    with guard.no_sync(mode="record") as region:
        y = step(step(x))
        y[0].item()
    assert rules(region) == ["host-read"]


def test_an_error_that_says_only_that_there_is_no_cuda_says_what_is_not_emulated(region):
    with pytest.raises(NotEmulatedError, match=r"^not emulated: aten\._nested_tensor_from_tensor_list"):
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cuda")
    with pytest.raises(RuntimeError, match="shape"):
        torch.ones(2, device="cuda").view(3)


def test_a_program_that_ends_by_such_an_error_ends_with_the_sentence(tmp_path, monkeypatch, capsys):
    program = tmp_path / "program.py"
    program.write_text("raise RuntimeError('0 active drivers ([]). There should only be one.')\n")
    monkeypatch.setattr("sys.argv", ["san"])
    assert run.main([str(program)]) == 1
    assert "\ngapless san: not emulated: kernels of Triton\n" in capsys.readouterr().err


def test_arguments_by_name_mean_what_they_mean_elsewhere():
    with torch.no_grad(), Detectors(["sync"], emulate_cuda=True):
        x = torch.ones(2, 3, device="cuda")
        assert (x.size(dim=1), x.stride(dim=0)) == (3, 3)
        assert torch.reshape(input=x, shape=(3, 2)).shape == (3, 2)


def test_random_states_that_are_held_are_given_to_no_other():
    with torch.no_grad(), Detectors(["sync"], emulate_cuda=True):
        first = torch.cuda.get_rng_state()
        torch.rand(2, device="cuda")
        second = torch.cuda.get_rng_state()
        expected = torch.rand(4, device="cuda").cpu()
        torch.cuda.set_rng_state(first)
        torch.rand(7, device="cuda")
        torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(second)
        assert torch.equal(torch.rand(4, device="cuda").cpu(), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_gradient_of_flex_attention_is_refused_in_one_sentence():
    with Detectors(["sync"], emulate_cuda=True):
        x = torch.ones(1, 1, 16, 8, device="cuda", requires_grad=True)
        with pytest.raises(NotImplementedError, match=r"^not emulated: the gradient of torch\.nn"):
            flex_attention(x, x, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
def test_a_trace_is_refused_for_tensors_on_the_device_alone(region):
    host = torch.nn.Linear(2, 2)
    traced = torch.jit.trace(host, torch.ones(1, 2))
    assert traced(torch.ones(3, 2)).shape == (3, 2)
    with pytest.raises(NotEmulatedError, match=r"not emulated: torch\.jit\.trace"):
        torch.jit.trace(torch.nn.Linear(2, 2, device="cuda"), torch.ones(1, 2, device="cuda"))


def test_functions_of_a_scan_are_watched(region):
    def body(carry, row):
        assert row.is_cuda
        return carry + row.sum().item(), carry * row

    out = scan(body, torch.zeros(3, device="cuda"), torch.ones(2, 3, device="cuda"))[1]
    assert out.is_cuda and set(rules(region)) == {"host-size"}

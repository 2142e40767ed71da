"""The fake accelerator behaves as a GPU does: asynchronous, with memory of its own, and without mercy for a missing
fence. Its operators give the CPU's bits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from fake_accelerator import child_environment
from torch import Tensor

from gapless.testing import fake

pytestmark = pytest.mark.fake


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    fake.load()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a stream has: the bits of a sum depend on it
    yield
    torch.set_num_threads(threads)
    fake.hold(False)
    fake.delays(None)
    try:
        fake.synchronize()
    except RuntimeError:
        fake.reset()


def on(device: str, values: tuple[object, ...]) -> list[object]:
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def flat(result: object) -> list[object]:
    if isinstance(result, Tensor):
        return [result.cpu()]
    if isinstance(result, (tuple, list)):
        return [one for part in result for one in flat(part)]
    return [result]


def same(function: Callable[..., object], *values: object) -> None:
    """The same results, bits and strides on both devices, and the same arguments afterwards."""
    wanted, got = [[value.clone() if isinstance(value, Tensor) else value for value in values] for _ in range(2)]
    got = on("fake", tuple(got))
    expected, found = flat(function(*wanted)), flat(function(*got))
    assert len(expected) == len(found)
    for one, other in zip([*expected, *flat(wanted)], [*found, *flat(got)], strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape, (one, other)
            assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)), (one, other)
        else:
            assert one == other


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return drawn > 0 if dtype == torch.bool else drawn.to(dtype)


POINTWISE = {
    "abs": torch.abs, "neg": torch.neg, "exp": torch.exp, "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "round": torch.round,
    "clamp": lambda x: x.clamp(-1, 1), "pow": lambda x: x.pow(2), "scalars": lambda x: 2 * x - 1 + x / 3,
    "compare": lambda x: (x > 0) & (x < 1) | ~(x != x), "where": lambda x: torch.where(x > 0, x, 0.5),
    "in place": lambda x: x.add_(1).mul_(x).clamp_(min=0), "masked_fill": lambda x: x.masked_fill(x > 1, -1.0),
    "cos": torch.cos, "tanh": torch.tanh, "floor": torch.floor, "sign": torch.sign,
    "isfinite": torch.isfinite, "fmod": lambda x: torch.fmod(x, 2), "lerp": lambda x: torch.lerp(x, x * 2, 0.25),
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(0), "cumsum": lambda x: x.cumsum(-1),
    "sum": lambda x: (x.sum(), x.sum(1, keepdim=True), x.mean(0)), "amax": lambda x: (x.amax(1), x.max(), x.min(0)),
    "argmax": lambda x: (x.argmax(), x.argmax(-1)), "sort": lambda x: x.sort(dim=-1, descending=True, stable=True),
    "topk": lambda x: x.topk(3), "norm": lambda x: x.norm(), "logsumexp": lambda x: x.logsumexp(1),
    "var": lambda x: x.var(1), "any": lambda x: ((x > 1).any(), (x > 1).all(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_a_float_operator_gives_the_bits_of_the_cpu(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        same(POINTWISE[name], numbers(5, 8, dtype=dtype))
    same(POINTWISE[name], numbers(8, 5).T[1:4])


INTEGERS: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x + 1, x * 2, x // 3, x % 3, -x, x.abs(), x.float() / 2),
    "bits": lambda x: (x & 3, x | 1, x ^ x, ~x),
    "reductions": lambda x: (x.sum(), x.sum(0), x.amax(1), x.cumsum(1), x.prod(1)),
    "compare": lambda x: (x == 1, x > 0, x.eq(x).all()),
    "convert": lambda x: (x.to(torch.float32), x.long(), x.bool(), x.to(torch.bfloat16)),
    "sort": lambda x: x.sort(stable=True),
    "scatter": lambda x: torch.zeros(5, 8, dtype=x.dtype, device=x.device).scatter_(1, x.long().abs() % 8, x),
}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.int16])
def test_an_integer_operator_gives_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    same(INTEGERS[name], numbers(5, 8).to(torch.int16).to(dtype))


def made(device: torch.device) -> list[Tensor]:
    return [
        torch.arange(5, device=device), torch.arange(1, 9, 2.0, device=device), torch.full((2,), 3, device=device),
        torch.ones(2, 3, dtype=torch.int8, device=device), torch.eye(3, device=device),
        torch.linspace(0, 1, 5, device=device), torch.tensor([[1, 2], [3, 4]], device=device),
        torch.zeros((), device=device), torch.tril_indices(3, 3, device=device), torch.empty(0, device=device),
        torch.scalar_tensor(4, device=device), torch.ones(3, 3, device=device).tril(), torch.zeros(2, 0, device=device),
    ]  # fmt: skip


def outputs(x: Tensor) -> list[Tensor]:
    outs = [torch.empty_like(x), torch.empty(0, device=x.device), torch.empty(0, dtype=torch.int64, device=x.device)]
    torch.add(x, 1, out=outs[0])
    torch.matmul(x, x.T, out=outs[1])
    torch.sum(x, 0, out=outs[0][0])
    torch.argmax(x, dim=1, out=outs[2])
    values, order, joined = [torch.empty_like(one) for one in (outs[1][0, :0], outs[2][:0], outs[1][0, :0])]
    torch.sort(x, out=(values, order))
    torch.index_select(x, 0, order[:, 0] % 4, out=outs[0])
    torch.cat([x, x], out=joined)
    return [*outs, values, order, joined]


def places(x: Tensor) -> list[Tensor]:
    index = torch.tensor([2, 0, 3], device=x.device)
    x[1] = 7
    x[index, 0] = x[index, 1] + 1
    x[:, -1].fill_(2)
    x[x > 5] = 0.5
    x[2:4, ::2] -= 1
    x.index_add_(0, index, x[:3].clone())
    x.index_copy_(0, index, x[:3] * 2)
    x.index_fill_(1, index[:1], 9.0)
    x.scatter_add_(1, index[None].expand(3, 3), x[:3, :3].contiguous())
    x.index_put_((index, index), torch.tensor(3.0, device=x.device), accumulate=True)
    parts = [x[index], x[:, index], x[index, index], x[None, 0], x[..., 1], x.gather(1, index[None])]
    return [*parts, x.take(index), x.index_select(1, index)]


def shapes(x: Tensor) -> list[Tensor]:
    return [
        x.T, x.reshape(-1), x.view(2, -1), x[:, 1:3], x.unsqueeze(0).expand(2, -1, -1), x.flatten(), x.squeeze(),
        x.permute(1, 0).contiguous(), x.unfold(1, 3, 2), x.as_strided((2, 2), (1, 2)), *x.chunk(2), *x.split(3, 1),
        torch.cat([x, x * 2]), torch.stack([x, x], 1), torch.cat([x, x[:, :1]], dim=1), x.roll(1, 0), x.flip(0),
        x.repeat(2, 1), x.repeat_interleave(2, 0), torch.broadcast_to(x[0], (3, 8)), F.pad(x, (1, 2)), x.diagonal(),
        x.view(torch.int32), x.clone(memory_format=torch.contiguous_format), x.tril(),
        *torch.meshgrid(x[0], x[1], indexing="ij"),
        x.movedim(0, 1), x.detach(), x.narrow(0, 1, 2), *x.unbind(0), x.new_zeros(3), torch.zeros_like(x), x.half(),
    ]  # fmt: skip


def products(x: Tensor) -> list[Tensor]:
    square, batch = x @ x.T, x.reshape(2, -1, 4)
    q = x.reshape(1, 2, -1, 4)
    attended = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return [
        square, torch.addmm(square, x, x.T), batch @ batch.transpose(1, 2), torch.bmm(batch, batch.transpose(1, 2)),
        F.linear(x, x, x[:, 0].contiguous()), x @ x[0], torch.einsum("ij,kj->ik", x, x), torch.outer(x[0], x[1]),
        attended, F.layer_norm(x, (8,)), F.rms_norm(x, (8,)), F.embedding(torch.tensor([1, 0], device=x.device), x),
        F.one_hot(torch.tensor([1, 0], device=x.device), 3), torch.dot(x[0], x[1]),
        torch.baddbmm(batch @ batch.mT, batch, batch.mT),
    ]  # fmt: skip


def decided_by_data(x: Tensor) -> list[object]:
    return [
        x.nonzero(), x[x > 0], torch.masked_select(x, x < 0), (x > 0).int().unique(return_counts=True),
        bool((x > 0).any()),
        x.sum().item(), x.tolist(), torch.equal(x, x), torch.allclose(x, x + 1), torch.where(x > 1), int(x.argmax()),
        torch.bincount((x > 0).long().flatten()), torch.repeat_interleave(torch.tensor([1, 2], device=x.device)),
        torch.searchsorted(x[0].sort().values, x[1].contiguous()), torch.bucketize(x, x[0].sort().values),
        torch.isin((x > 0).int(), torch.tensor([1], device=x.device)), torch.histc(x, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("function", [outputs, places, shapes, products, decided_by_data])
def test_a_family_of_operators_gives_the_bits_of_the_cpu(function: Callable[[Tensor], object]) -> None:
    same(function, numbers(4, 8))


def test_a_new_tensor_has_the_values_of_the_cpu() -> None:
    for one, other in zip(made(torch.device("cpu")), made(torch.device("fake")), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other.cpu())


def test_a_number_of_the_host_is_taken_and_a_tensor_is_refused() -> None:
    x = numbers(4).to("fake")
    assert torch.equal((x * torch.tensor(2.0)).cpu(), x.cpu() * 2)
    assert torch.equal(x[torch.tensor([1, 2])].cpu(), x.cpu()[1:3])
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + numbers(4)


def test_gradients_and_autocast_are_those_of_the_cpu() -> None:
    def learned(x: Tensor) -> list[Tensor]:
        w = x.clone().requires_grad_()
        q = F.layer_norm(F.linear(x, w), (4,)).reshape(1, 1, 4, 4)
        (F.scaled_dot_product_attention(q, q, q).sum() + (x @ w.T).square().sum()).backward()
        assert w.grad is not None
        return [w.grad]

    x = numbers(4, 8)
    for one, other in zip(learned(x), learned(x.to("fake")), strict=True):
        torch.testing.assert_close(one, other.cpu())
    with torch.autocast("fake", dtype=torch.bfloat16):
        assert F.linear(x.to("fake"), x.to("fake")).dtype == torch.bfloat16


def test_a_wrong_shape_is_an_error_of_the_launch() -> None:
    x = numbers(4, 3).to("fake")
    with pytest.raises(RuntimeError, match="must match"):
        x + numbers(4, 2).to("fake")
    assert x.sum().cpu().shape == ()


def test_a_tensor_is_printed_and_converted_by_way_of_the_host() -> None:
    x = torch.arange(3, device="fake")
    assert str(x) == "tensor([0, 1, 2], device='fake:0')"
    assert x.cpu().numpy().tolist() == [0, 1, 2] and x.device == torch.device("fake", 0)
    x.resize_(5)[3:] = 9
    assert x.tolist() == [0, 1, 2, 9, 9]


def test_a_launch_returns_while_the_device_is_held() -> None:
    fake.hold(True)
    x = torch.ones(4, device="fake")
    done = torch.Event("fake")
    y = x * 3
    done.record()
    assert not done.query()
    fake.hold(False)
    done.synchronize()
    assert done.query() and y.tolist() == [3] * 4


def two_streams(with_event: bool) -> list[float]:
    """The values that one stream reads of what another one writes."""
    first, second = torch.Stream("fake"), torch.Stream("fake")
    x = torch.zeros(4, device="fake")
    fake.synchronize()
    written = torch.Event("fake")
    with first:
        x.add_(1)
        written.record()
    with second:
        if with_event:
            second.wait_event(written)
        y = x * 2
    second.synchronize()
    return list(y.tolist())


def test_a_missing_event_gives_wrong_bytes_in_a_lazy_mood() -> None:
    fake.delays(1, lazy=True)
    assert two_streams(with_event=True) == [2] * 4
    assert two_streams(with_event=False) == [0] * 4


def test_a_lazy_stream_begins_after_some_questions() -> None:
    fake.delays(1, lazy=True)
    torch.ones(4, device="fake")
    done = torch.Event("fake")
    done.record()
    assert not done.query()
    deadline = time.monotonic() + 20
    while not done.query():
        assert time.monotonic() < deadline, "questions alone never begin the work"


def test_pinned_memory_is_read_when_the_stream_gets_there() -> None:
    fake.hold(True)
    source = torch.zeros(4).pin_memory()
    x = source.to("fake", non_blocking=True)
    source.fill_(5)
    assert x.tolist() == [5] * 4, "the copy began after the write"
    target = torch.zeros(4, pin_memory=True)
    target.copy_(x, non_blocking=True)
    assert target.tolist() == [0] * 4
    fake.synchronize()
    assert target.tolist() == [5] * 4


def test_freed_pinned_memory_is_kept_until_its_copy_is_done() -> None:
    fake.hold(True)
    source = torch.ones(3000).pin_memory()
    address = source.data_ptr()
    x = source.to("fake", non_blocking=True)
    del source
    assert torch.zeros(3000).pin_memory().data_ptr() != address
    assert x.sum().item() == 3000


def test_memory_is_reused_on_its_stream_at_once_and_elsewhere_after_record_stream() -> None:
    other = torch.Stream("fake")
    x = torch.empty(1000, device="fake")
    address = x.data_ptr()
    del x
    x = torch.empty(1000, device="fake")
    assert x.data_ptr() == address
    fake.hold(True)
    with other:
        x.add_(1)
    x.record_stream(other)
    del x
    y = torch.empty(1000, device="fake")
    assert y.data_ptr() != address
    fake.hold(False)
    fake.synchronize()
    del y
    assert address in {tensor.data_ptr() for tensor in [torch.empty(1000, device="fake") for _ in range(2)]}


def test_memory_that_nothing_has_written_is_poisoned() -> None:
    assert set(torch.empty(100, dtype=torch.uint8, device="fake").tolist()) == {0xA5}


def test_memory_is_counted_and_runs_out() -> None:
    free, total = torch.accelerator.get_memory_info()
    before = torch.accelerator.memory_stats()
    x = torch.empty(3 << 20, device="fake", dtype=torch.uint8)
    after = torch.accelerator.memory_stats()
    assert after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"] == 3 << 20
    assert after["num_device_alloc"] >= before["num_device_alloc"] and free <= total
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(total, device="fake", dtype=torch.uint8)
    del x
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info()[0] >= free


def test_an_error_of_a_kernel_shows_later_and_stays() -> None:
    x = torch.zeros(4, device="fake")
    y = x[torch.tensor([9]).to("fake")]  # the launch knows nothing of values
    for call in (fake.synchronize, lambda: x + 1, y.tolist, lambda: torch.zeros(2).to("fake")):
        with pytest.raises(RuntimeError, match=r"fake device: aten::index.*out of bounds"):
            call()
    fake.reset()
    assert (x + 1).tolist() == [1] * 4


def test_events_have_times_in_the_order_of_the_stream() -> None:
    events = [torch.Event("fake", enable_timing=True) for _ in range(2)]
    events[0].record()
    torch.ones(1000, device="fake").sum()
    events[1].record()
    events[1].synchronize()
    assert 0 < events[0].elapsed_time(events[1]) < 60_000


@pytest.mark.parametrize("own", [True, False])
def test_a_replay_reads_new_values_at_fixed_addresses(own: bool) -> None:
    if not own and not hasattr(torch.accelerator, "Graph"):
        pytest.skip("this torch has no torch.accelerator.Graph")
    graph = fake.Graph() if own else torch.accelerator.Graph()
    stream = torch.Stream("fake")
    x = numbers(4, 4).to("fake")
    fake.synchronize()
    with stream:
        graph.capture_begin()
        assert torch.accelerator.current_stream() == stream
        y = ((x @ x).softmax(-1) + 1).sum(0)
        graph.capture_end()
    for seed in (1, 2):
        x.copy_(numbers(4, 4, seed=seed))
        with stream:
            graph.replay()
        stream.synchronize()
        other = numbers(4, 4, seed=seed)
        assert torch.equal(y.cpu(), ((other @ other).softmax(-1) + 1).sum(0))


def test_memory_of_a_graph_is_kept_for_it() -> None:
    graph, stream = fake.Graph(), torch.Stream("fake")
    x = torch.ones(1000, device="fake")
    fake.synchronize()
    with stream:
        graph.capture_begin()
        temporary = x * 2
        address = temporary.data_ptr()
        y = temporary + 1
        del temporary
        graph.capture_end()
        others = [torch.full((1000,), 7.0, device="fake") for _ in range(4)]
        assert address not in {other.data_ptr() for other in others}
        graph.replay()
    stream.synchronize()
    assert y.tolist() == [3] * 1000


@pytest.mark.parametrize("what", ["item", "synchronize", "query", "nonzero", "pageable"])
def test_a_capture_refuses_to_wait(what: str) -> None:
    graph, stream = fake.Graph(), torch.Stream("fake")
    x = torch.ones(4, device="fake")
    fake.synchronize()
    calls: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(), "synchronize": torch.accelerator.synchronize, "query": stream.query,
        "nonzero": x.nonzero, "pageable": x.cpu,
    }  # fmt: skip
    with stream:
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            calls[what]()
        with pytest.raises(RuntimeError, match="the capture failed"):
            graph.capture_end()
        assert (x + 1).tolist() == [2] * 4


def test_a_custom_operator_that_only_writes_runs_on_the_stream() -> None:
    library = torch.library.Library("fake_accelerator_test", "FRAGMENT")
    library.define("double_(Tensor(a!) x, Tensor y) -> ()")
    library.define("nowhere(Tensor x) -> Tensor")

    def double(x: Tensor, y: Tensor) -> None:
        x.copy_(y * 2)

    library.impl("double_", double, "CPU")
    x, y = torch.zeros(4, device="fake"), torch.ones(4, device="fake")
    fake.hold(True)
    torch.ops.fake_accelerator_test.double_(x, y)
    done = torch.Event("fake")
    done.record()
    assert not done.query(), "the launch waited"
    fake.hold(False)
    assert x.tolist() == [2] * 4
    with pytest.raises(NotImplementedError, match="fake_accelerator_test::nowhere"):
        torch.ops.fake_accelerator_test.nowhere(x)


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=120, check=False)


EXITS = {
    "queued": "fake.hold(True); x = torch.ones(1000, device='fake'); y = x + 1",
    "lazy": "fake.delays(3, lazy=True); x = torch.ones(100, device='fake'); [x @ x for _ in range(50)]",
    "busy": "x = torch.ones(500, 500, device='fake'); [x @ x for _ in range(100)]",
}


@pytest.mark.process
@pytest.mark.parametrize("name", EXITS)
def test_a_process_ends_cleanly_with_work_in_its_queues(name: str) -> None:
    program = f"import torch; from gapless.testing import fake; fake.load(); {EXITS[name]}; print('end')"
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.process
def test_the_device_has_no_memory_that_the_host_can_read() -> None:
    program = (
        "import torch, ctypes; from gapless.testing import fake; fake.load(); x = torch.ones(4, device='fake'); "
        "x.tolist(); ctypes.string_at(x.data_ptr(), 4)"
    )
    assert run(program).returncode == -11


def test_an_emptied_cache_keeps_blocks_whose_work_is_queued() -> None:
    """One thread empties the cache while others compute and free: a block must not reach another stream too early."""
    fake.delays(3, most_us=100)
    wrong: list[int] = []
    ended = threading.Event()

    def compute() -> None:
        torch.accelerator.set_stream(torch.Stream("fake"))
        for turn in range(60):
            first = torch.full((300_000,), float(turn), device="fake")
            second = first + 1
            third = second * 2
            del first
            result = third + second
            del second, third
            if not bool((result.cpu() == 3 * (turn + 1)).all()):
                wrong.append(turn)

    def empty() -> None:
        while not ended.is_set():
            torch.accelerator.empty_cache()

    workers, emptier = [threading.Thread(target=compute) for _ in range(3)], threading.Thread(target=empty)
    for thread in (*workers, emptier):
        thread.start()
    for thread in workers:
        thread.join()
    ended.set()
    emptier.join()
    assert not wrong


def test_a_capture_whose_graph_is_reset_elsewhere_ends() -> None:
    graph, began, was_reset, seen = torch.fake.Graph(), threading.Event(), threading.Event(), []

    def capture() -> None:
        torch.accelerator.set_stream(torch.Stream("fake"))
        graph.capture_begin()
        began.set()
        assert was_reset.wait(60)
        seen.append(torch.ones(3, device="fake").sum().item())

    thread = threading.Thread(target=capture)
    thread.start()
    assert began.wait(60)
    graph.reset()
    was_reset.set()
    thread.join()
    assert seen == [3]


def test_views_that_conjugate_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="conj_physical"):
        torch.view_as_complex(torch.ones(3, 2, device="fake")).conj()


def test_indices_of_the_host_are_taken_by_indexing_alone() -> None:
    x, rows = torch.arange(6.0, device="fake"), torch.tensor([3, 1])
    assert x[rows].tolist() == [3, 1]
    with pytest.raises(RuntimeError, match="same device"):
        x.index_select(0, rows)


LATE = """
import atexit, torch

def late():
    try:
        torch.ones(4, device="fake")
    except RuntimeError as error:
        print("refused:", error)

atexit.register(late)
from gapless.testing import fake
fake.load()
print(torch.ones(4, device="fake").tolist())
"""


@pytest.mark.process
def test_work_after_the_end_is_refused() -> None:
    done = run(LATE)
    assert done.returncode == 0 and "refused: the fake accelerator has ended" in done.stdout, done.stdout + done.stderr


def test_a_reused_block_has_no_bytes_of_its_last_owner_for_a_reader_that_comes_too_early() -> None:
    for _ in range(3):
        fake.delays(None)
        torch.ones(1000, device="fake").sum().item()
        fake.delays(1, lazy=True)
        side, host = torch.Stream("fake"), torch.zeros(1000, pin_memory=True)
        x = torch.ones(1000, device="fake")
        with side:
            host.copy_(x, non_blocking=True)
        side.synchronize()
        assert not bool((host == 1).any())
        torch.accelerator.synchronize()

"""Works of torch.distributed: what waits for them, and what does not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

EMULATED = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")
pytestmark = EMULATED

FLAGS = ("--device-tensors", "cuda")
BEGIN = """
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    x, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    host = torch.ones(4)
"""


@pytest.fixture
def no_group_left():
    """Ends the groups of a program that did not."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def races(san_source):
    """Returns the lines of the races of a program, counted from its first line after the beginning."""

    def found(body: str) -> list[int]:
        lines = [line.strip() for line in body.strip().splitlines()]
        try:
            _, report, said = san_source(BEGIN + "".join(f"    {line}\n" for line in lines), "--device-tensors", "cuda")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        assert not report["incomplete"], said.err
        first = BEGIN.count("\n") + 1
        return [entry["line"] - first + 1 for entry in report["findings"] if entry["rule"] == "race"]

    return found


@pytest.mark.usefixtures("no_group_left")
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("'nccl'", "nccl cuda:nccl"), ("'cpu:gloo,cuda:nccl'", "cpu:gloo,cuda:nccl cpu:gloo,cuda:nccl"),
        ("None", "undefined cuda:nccl"), ("device_id=torch.device('cuda', 0)", "nccl cuda:nccl"),
    ],
)  # fmt: skip
def test_groups_name_the_backend_that_they_were_made_with(san_source, backend, names):
    _, report, said = san_source(
        BEGIN.replace('"nccl"', backend)
        + """
    from torch.distributed.device_mesh import init_device_mesh
    mesh, named = init_device_mesh("cuda", (1,)).get_group(), dist.new_group([0], backend="gloo")
    for one in (None, dist.group.WORLD, dist.new_group([0]), mesh, named):
        print(dist.get_backend(one), dist.get_backend_config(group=one))
        dist.all_reduce(x, group=one)
    """,
        *FLAGS,
    )
    assert not report["incomplete"], said.err
    lines = said.out.splitlines()
    assert set(lines[:4]) == {names}, said.out
    assert lines[4].split()[0] == "gloo"


STARTS = {
    "all_reduce": ("dist.all_reduce(x, async_op=True)", "x"),
    "reduce": ("dist.reduce(x, 0, async_op=True)", "x"),
    "all_gather": ("dist.all_gather([x], y, async_op=True)", "x"),
    "gather": ("dist.gather(y, [x], async_op=True)", "x"),
    "scatter": ("dist.scatter(x, [y], async_op=True)", "x"),
    "reduce_scatter": ("dist.reduce_scatter(x, [y], async_op=True)", "x"),
    "all_to_all": ("dist.all_to_all([x], [y], async_op=True)", "x"),
    "all_to_all_single": ("dist.all_to_all_single(x, y, async_op=True)", "x"),
    "methods": ("group.allreduce(x)", "x"),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_result_is_read_after_its_work_alone(races, name):
    start, result = STARTS[name]
    assert races(f"work = {start}\n{result} + 1") == [2]
    for wait in ("work.wait()", "work.synchronize()", "while not work.is_completed(): pass"):
        assert races(f"work = {start}\n{wait}\n{result} + 1\n{result}.add_(1)\ny.add_(1)") == []


def test_memory_that_a_work_reads_may_be_read_and_not_written(races):
    assert races("work = dist.all_gather([x], y, async_op=True)\ny + 1\ny.add_(1)\nwork.wait()") == [3]
    assert races("work = dist.broadcast(x, 0, async_op=True)\nx + 1\nwork.wait()\nx.add_(1)") == []


def test_a_synchronous_collective_is_the_current_streams(races):
    assert races("dist.all_reduce(x)\nx + 1\nx.add_(1)") == []
    assert races("work = dist.all_reduce(x, async_op=True)\ndist.all_reduce(x)\nwork.wait()") == [2]


def test_the_host_does_not_wait_for_a_devices_work(races):
    pinned = "pinned = torch.zeros(4, pin_memory=True)\n"
    copy = "pinned.copy_(x, non_blocking=True)\n"
    assert races(f"{pinned}work = dist.all_reduce(x, async_op=True)\nwork.wait()\n{copy}pinned.sum()") == [5]
    assert races(f"{pinned}{copy}work = dist.all_reduce(x, async_op=True)\nwork.wait()\npinned.sum()") == [5]
    assert races(f"{pinned}{copy}dist.barrier()\npinned.sum()") == []


def test_a_work_on_host_tensors_is_waited_for_by_the_host(races):
    start = 'gloo = dist.new_group(backend="gloo")\nwork = dist.all_reduce(host, group=gloo, async_op=True)\n'
    assert races(f"{start}host.add_(1)\nwork.wait()") == [3]
    assert races(f"{start}work.wait()\nhost.add_(1)") == []
    assert races(f"{start}while not work.is_completed(): pass\nhost.add_(1)") == []


def test_another_stream_waits_for_itself(races):
    other = "side = torch.cuda.Stream()\nwork = dist.all_reduce(x, async_op=True)\n"
    inside = "with torch.cuda.stream(side): work.wait(); x.add_(1)\n"
    assert races(f"{other}{inside}x + 1") == [4]
    assert races(f"{other}{inside}torch.cuda.current_stream().wait_stream(side)\nx + 1") == []


def test_a_future_carries_the_order_of_its_collective(races):
    start = "future = dist.all_reduce(x, async_op=True).get_future()\n"
    then = "after = future.then(lambda done: done.value()[0].div_(2))\n"
    assert races(f"{start}{then}after.wait().add_(1)\nx + 1") == []
    assert races(f"{start}torch.futures.wait_all([future])\nx + 1") == []
    assert races(f"{start}torch.futures.collect_all([future]).wait()\nx + 1") == []
    assert races(f"{start}future.done()\nx + 1") == [3]


def test_memory_stays_with_its_work_when_its_tensors_go(races):
    start = "work = dist.all_reduce(torch.ones(1000, device='cuda'), async_op=True)\n"
    assert races(f"{start}torch.zeros(1000, device='cuda')") == []


@pytest.mark.parametrize("device", ["", "device=torch.device('cuda'), "])
def test_coalesced_collectives_are_waited_for_together(races, device):
    inside = "dist.all_reduce(x); dist.all_reduce(y)"
    start = f"with dist._coalescing_manager({device}async_ops=True) as manager: {inside}\n"
    assert races(f"{start}y + 1\nmanager.wait()") == [2]
    assert races(f"{start}manager.wait()\nx + y") == []
    assert races(f"{start.replace('True', 'False').replace(' as manager', '')}x + y") == []


def test_functional_collectives_run_on_the_groups_stream(races):
    ops = "torch.ops._c10d_functional"
    assert races(f"z = {ops}.all_reduce(x, 'sum', group.group_name)\nx.add_(1)\nz + 1") == [3]
    assert races(f"z = {ops}.all_reduce_(x, 'sum', group.group_name)\nx.add_(1)\nfunctional.wait_tensor(z)") == [2]
    assert races("z = functional.all_reduce(x, 'sum', group)\nx.add_(1)\nz + 1\nfunctional.wait_tensor(y)") == []


DATA_PARALLEL = """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel
    for hook in (None, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        model = DistributedDataParallel(model.to("cuda"))  # san: ok(set-up)
        if hook:
            model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(3):
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
"""


def test_distributed_data_parallel_gives_no_report(san_source, no_group_left):
    code, report, said = san_source(BEGIN + DATA_PARALLEL, "--device-tensors", "cuda")
    assert (code, report["reports"], report["incomplete"]) == (0, 0, ""), said.err


def test_after_a_run_torchs_groups_are_as_before(races):
    owners = (dist.ProcessGroup, dist.distributed_c10d.Work, dist.Reducer, torch.futures.Future.__base__)
    before = [dict(vars(owner)) for owner in owners]
    assert races("dist.all_reduce(x)") == []
    assert [dict(vars(owner)) for owner in owners] == before


def test_a_device_is_made_of_its_number(san_source):
    code, report, said = san_source("import torch\nassert torch.device(0) == torch.ones(1, device=0).device", *FLAGS)
    assert (code, report["incomplete"]) == (0, ""), said.err

"""Code that torch calls back: every place where torch calls the user's code from inside its own calls, times every form
of a wait, of CUDA's set-up and of a question about the device. All are as they are in the program's own lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gapless.guard.detectors import Detectors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")

Body = Callable[[Tensor], object]

# What waits, by the rule that names it.
WAITS: dict[str, tuple[str, Body]] = {
    "tolist": ("host-read", lambda t: t.tolist()),
    "cpu": ("copy-to-host", lambda t: t.cpu()),
    "to": ("copy-to-host", lambda t: t.to("cpu")),
    "numpy": ("copy-to-host", lambda t: t.cpu().numpy()),
    "repr": ("host-read", lambda t: repr(t)),
    "item": ("host-read", lambda t: t.view(-1)[0].item()),
    "bool": ("host-read", lambda t: bool(t.view(-1)[0] > 0)),
    "mask": ("mask-index", lambda t: t[t > 0]),
    "assign": ("upload", lambda t: t.clone().view(-1).__setitem__(slice(2), torch.ones(2))),
}


def _goes_up(t: Tensor) -> None:
    host = torch.ones(2)
    assert not host.is_cuda and host.cpu() is host
    for up in (host.to("cuda"), host.cuda(), torch.tensor([1.0], device="cuda"), torch.zeros(2, device=t.device)):
        assert up.is_cuda and up.device.type == "cuda"


def _is_pinned(t: Tensor) -> None:
    for make in (lambda: torch.empty(2, pin_memory=True), lambda: torch.ones(2).pin_memory()) * 2:
        pinned = make()
        assert pinned.is_pinned() and not pinned.is_cuda


def _is_on_the_device(t: Tensor) -> None:
    assert t.is_cuda and not t.is_cpu and t.get_device() == 0
    assert (t.device, t.device.type) == (torch.device("cuda", 0), "cuda")
    assert (t * 2).is_cuda and torch.zeros_like(t).is_cuda and t.new_zeros(2).is_cuda
    assert not torch.zeros(2).is_cuda


ASKS: dict[str, tuple[set[str], Body]] = {
    "up": ({"upload", "list-to-device"}, _goes_up),
    "pinned": ({"pinned-alloc"}, _is_pinned),
    "place": (set(), _is_on_the_device),
}


def leaf() -> Tensor:
    return torch.ones(2, 3, device="cuda", requires_grad=True)


def once(body: Body) -> Body:
    """Return a function that calls the body the first time alone."""
    calls = iter([body])

    def called(t: Tensor) -> None:
        next(calls, lambda t: None)(t.detach())

    return called


def tensor_hook(body: Body) -> None:
    x = leaf()
    y = x * 2
    y.register_hook(lambda grad: body(grad) and None)
    y.sum().backward()


def accumulate_hook(body: Body) -> None:
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda x: body(x.grad) and None)
    (x * 2).sum().backward()


def node_hook(body: Body) -> None:
    y = leaf() * 2
    y.grad_fn.register_hook(lambda into, out: body(out[0]) and None)
    y.sum().backward()


def node_prehook(body: Body) -> None:
    y = leaf() * 2
    y.grad_fn.register_prehook(lambda out: body(out[0]) and None)
    y.sum().backward()


def multi_hook(body: Body) -> None:
    x, y = leaf(), leaf()
    torch.autograd.graph.register_multi_grad_hook((x, y), lambda grads: body(grads[0]) and None)
    (x * y).sum().backward()


def after_backward(body: Body) -> None:
    x = leaf()
    engine = vars(torch.autograd.Variable)["_execution_engine"]
    x.register_hook(lambda grad: engine.queue_callback(lambda: body(grad)))
    x.sum().backward()


def grad_of(body: Body) -> None:
    x = leaf()
    y = x * 2
    y.register_hook(lambda grad: body(grad) and None)
    torch.autograd.grad(y.sum(), x)


def backward_of_several(body: Body) -> None:
    x = leaf()
    x.register_hook(lambda grad: body(grad) and None)
    torch.autograd.backward([x.sum(), (x * 2).sum()])


def backward_in_backward(body: Body) -> None:
    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            tensor_hook(body)

    x = leaf()
    x.register_hook(hook)
    x.sum().backward()


def _layer() -> nn.Linear:
    return nn.Linear(3, 3, device="cuda")


def forward_hook(body: Body) -> None:
    layer = _layer()
    layer.register_forward_hook(lambda layer, args, out: body(out.detach()) and None)
    layer(leaf())


def forward_prehook(body: Body) -> None:
    layer = _layer()
    layer.register_forward_pre_hook(lambda layer, args: body(args[0].detach()) and None)
    layer(leaf())


def backward_hook(body: Body) -> None:
    layer = _layer()
    layer.register_full_backward_hook(lambda layer, into, out: body(out[0]) and None)
    layer(leaf()).sum().backward()


def backward_prehook(body: Body) -> None:
    layer = _layer()
    layer.register_full_backward_pre_hook(lambda layer, out: body(out[0]) and None)
    layer(leaf()).sum().backward()


def function(where: str, body: Body) -> None:
    def at(place: str, t: Tensor) -> None:
        if place == where:
            body(t)

    class Twice(Function):
        @staticmethod
        def forward(x):
            at("forward", x)
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            at("setup", inputs[0].detach())
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            at("backward", grad)
            at("saved", ctx.saved_tensors[0].detach())
            return grad * 2

        @staticmethod
        def vmap(info, in_dims, x):
            return Twice.apply(x), in_dims[0]

    Twice.apply(leaf()).sum().backward()


def pack(body: Body) -> None:
    def packed(t: Tensor) -> Tensor:
        body(t)
        return t

    body = once(body)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
        leaf().sigmoid()


def pack_within(body: Body) -> None:
    """A function of torch that is written in Python saves tensors."""

    def packed(t: Tensor) -> Tensor:
        body(t)
        return t

    body = once(body)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
        F.gumbel_softmax(leaf())


def unpack(body: Body) -> None:
    def unpacked(t: Tensor) -> Tensor:
        body(t)
        return t

    body = once(body)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
        y = leaf().sigmoid()
    y.sum().backward()


def saved_one(body: Body) -> None:
    y = leaf().sigmoid()
    y.grad_fn._raw_saved_result.register_hooks(lambda t: (body(t), t)[1], lambda t: t)


def second_forward(reentrant: bool, body: Body) -> None:
    forwards = []

    def run(x: Tensor) -> Tensor:
        forwards.append(1)
        if len(forwards) == 2:
            body(x.detach())
        return (x * 2).sigmoid()

    checkpoint(run, leaf(), use_reentrant=reentrant).sum().backward()
    assert len(forwards) == 2


class Counting(Tensor):
    """A tensor whose class overrides torch's functions."""

    body: Body = staticmethod(lambda t: None)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            cls.body(args[0].as_subclass(Tensor))
        return super().__torch_function__(func, types, args, kwargs or {})


def overriding_class(body: Body) -> None:
    class One(Counting):
        pass

    x = torch.ones(2, 3, device="cuda").as_subclass(One)
    One.body = staticmethod(once(body))
    y = x + 1
    with torch._C.DisableTorchFunctionSubclass():
        assert type(y) is One and y.is_cuda


def overriding_class_alone(body: Body) -> None:
    """The class switches all overrides off, which is how older code calls torch from inside one."""

    class Plain(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunction():
                heard(args[0].as_subclass(Tensor))
                return func(*args, **(kwargs or {}))

    heard = once(body)
    x = torch.ones(2, 3, device="cuda").as_subclass(Plain)
    assert (x + 1).is_cuda


@pytest.mark.parametrize("name", ["DisableTorchFunction", "DisableTorchFunctionSubclass"])
def test_what_switches_overrides_off_is_still_an_instance_of_its_class(name):
    with Detectors(["sync", "race"], emulate_cuda=True):
        off = getattr(torch._C, name)()
        assert isinstance(off, torch._C.DisableTorchFunction) and isinstance(off, getattr(torch._C, name))
        assert not isinstance(None, torch._C.DisableTorchFunction)
        with off:
            assert torch.ones(2, device="cuda").is_cuda


def test_the_guard_switches_functions_off_by_torchs_own_class(monkeypatch):
    callers = []

    def counted():
        callers.append(sys._getframe(1).f_globals["__name__"])
        return real()

    real = torch._C.DisableTorchFunction
    with Detectors(["sync", "race"], emulate_cuda=True):
        monkeypatch.setattr(torch._C, "DisableTorchFunction", counted)
        overriding_class(lambda t: t * 2)
        leaf().sum().backward()
        torch.ones(4, pin_memory=True).numpy().sum()
        monkeypatch.undo()
    assert not [name for name in callers if name.startswith("gapless.")]


def overriding_object(body: Body) -> None:
    class Box:
        def __torch_function__(self, func, types, args=(), kwargs=None):
            body(self.inner)
            return func(*(arg.inner if isinstance(arg, Box) else arg for arg in args), **(kwargs or {}))

    box = Box()
    box.inner = torch.ones(2, 3, device="cuda")
    assert torch.add(box, 1).is_cuda


class Wrapped(Tensor):
    """A tensor that wraps another, and takes operators apart."""

    @staticmethod
    def __new__(cls, elem, body):
        return Tensor._make_wrapper_subclass(cls, elem.size(), dtype=elem.dtype, device=elem.device)

    def __init__(self, elem, body):
        self.elem, self.body = elem, body

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        one = next(arg for arg in args if isinstance(arg, Wrapped))
        one.body(one.elem)
        out = func(*(arg.elem if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))
        return cls(out, one.body) if isinstance(out, Tensor) else out


class Flat(Wrapped):
    def __tensor_flatten__(self):
        return ["elem"], self.body

    @staticmethod
    def __tensor_unflatten__(inner, body, size, stride):
        return Flat(inner["elem"], body)


def wrapper(kind: type[Wrapped], body: Body) -> None:
    x = kind(torch.ones(2, 3, device="cuda"), once(body))
    assert x.is_cuda
    y = x * 2
    assert y.is_cuda and y.elem.is_cuda and type(y) is kind


def dispatch_mode(body: Body) -> None:
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mul.Tensor:
                body(args[0])
            return func(*args, **(kwargs or {}))

    with Seeing():
        assert (torch.ones(2, 3, device="cuda") * 2).is_cuda
        assert torch.zeros(2, device="cuda").is_cuda and not torch.zeros(2).is_cuda


def optimizer_hooks(body: Body) -> None:
    layer = _layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *args: body(layer.weight.detach()) and None)
    layer(leaf()).sum().backward()
    optimizer.step()


def distance(body: Body) -> None:
    def far(a: Tensor, b: Tensor) -> Tensor:
        heard(a.detach())
        return (a - b).norm(dim=1)

    heard = once(body)
    F.triplet_margin_with_distance_loss(leaf(), leaf(), leaf(), distance_function=far)


PLACES: dict[str, Callable[[Body], None]] = {
    one.__name__: one
    for one in (
        tensor_hook, accumulate_hook, node_hook, node_prehook, multi_hook, after_backward, grad_of,
        backward_of_several, backward_in_backward, forward_hook, forward_prehook, backward_hook, backward_prehook, pack,
        pack_within, unpack, saved_one, overriding_class, overriding_class_alone,
        overriding_object, dispatch_mode, optimizer_hooks, distance,
    )
} | {
    **{f"function_{at}": partial(function, at) for at in ("forward", "setup", "backward", "saved")},
    **{f"second_forward_{reentrant}": partial(second_forward, reentrant) for reentrant in (True, False)},
    **{f"class_{kind.__name__}": partial(wrapper, kind) for kind in (Wrapped, Flat)},
}  # fmt: skip


def found_in(place: Callable[[Body], None], body: Body) -> tuple[int, list[tuple[str, int]]]:
    """Run the body in a place; returns how often it ran, and the rules and lines of what was found."""
    runs = []

    def counted(t: Tensor) -> None:
        runs.append(t)
        body(t)

    with Detectors(["sync", "race"], emulate_cuda=True) as detectors:
        place(counted)
        runs[:] = [1] * len(runs)
    return len(runs), [(entry.finding.rule, entry.finding.user.line) for entry in detectors.findings()]


@pytest.mark.parametrize("place", PLACES)
def test_a_wait_is_seen_at_its_line_when_torch_calls_the_code_back(place):
    for name, (rule, body) in WAITS.items():
        runs, found = found_in(PLACES[place], body)
        assert runs, name
        assert found == [(rule, body.__code__.co_firstlineno)], name


@pytest.mark.parametrize("place", PLACES)
def test_a_device_is_given_and_answered_when_torch_calls_the_code_back(place):
    for name, (rules, body) in ASKS.items():
        runs, found = found_in(PLACES[place], body)
        assert runs, name
        assert {rule for rule, line in found} == rules, name


FSDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cuda", (1,))
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
for layer in (model[0], model):
    fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(2):
    model(torch.ones(4, 8, device="cuda")).square().mean().backward()
    assert not any(parameter.grad.is_cuda for parameter in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.process
def test_gradients_that_fsdp_offloads_in_backward_are_on_the_host(san_source):
    _, report, said = san_source(FSDP, "--device-tensors", "cuda")
    assert not report["incomplete"], said.err
    lines = FSDP.splitlines()
    at = {(entry["rule"], lines[entry["line"] - 1].split("(")[0].strip()) for entry in report["findings"]}
    # Its copies in backward are waited for by an event; the step itself is on the host.
    assert {rule for rule, line in at if line.startswith("model")} == {"pinned-alloc", "event-wait"}
    assert not [rule for rule, line in at if line.startswith("optimizer")]


def test_a_gradient_is_where_its_leaf_is():
    with Detectors(["sync"], emulate_cuda=True) as detectors:
        host, device = torch.ones(2, requires_grad=True), leaf()
        host.to("cuda").half().sum().backward()
        device.cpu().sum().backward()
        assert host.grad.is_cpu and device.grad.is_cuda
        twice = torch.ones(2, requires_grad=True)
        (first,) = torch.autograd.grad(twice.cuda().pow(3).sum(), twice, create_graph=True)
        first.sum().backward()
        assert twice.grad.is_cpu and twice.grad.tolist() == [6.0, 6.0]
    rules = [entry.finding.rule for entry in detectors.findings()]
    assert sorted(set(rules)) == ["copy-to-host", "upload"]


def test_a_copy_of_a_wrapping_class_copies_what_is_inside():
    with Detectors(["sync"], emulate_cuda=True) as detectors:
        for kind in (Wrapped, Flat):
            host = kind(torch.ones(3), lambda t: None)
            up = host.to("cuda", torch.float16)
            down = up.cpu()
            assert (up.is_cuda, up.elem.is_cuda, up.dtype) == (True, True, torch.float16)
            assert not (host.elem.is_cuda or down.is_cuda or down.elem.is_cuda)
    assert [(entry.finding.rule, entry.count) for entry in detectors.findings()] == [("upload", 2), ("copy-to-host", 2)]


def test_a_tensor_that_is_made_like_another_is_where_the_program_says():
    with Detectors(["sync"], emulate_cuda=True):
        x = torch.ones(3, device="cuda")
        for made in (
            torch.empty_like(x, device="cpu"),
            x.new_zeros(3, device="cpu"),
            torch.full_like(x, 2, device="cpu"),
        ):
            assert not made.is_cuda
        assert torch.empty_like(x).is_cuda and torch.empty_like(torch.ones(3), device="cuda").is_cuda


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_of_functions_leave_tensors_on_their_device():
    def seen(t: Tensor) -> Tensor:
        places.append((t.is_cuda, (t * 2).is_cuda, torch.zeros_like(t).is_cuda))
        return (t * t).sum()

    places: list[tuple[bool, bool, bool]] = []
    with Detectors(["sync", "race"], emulate_cuda=True):
        x = torch.ones(2, 3, device="cuda")
        results = [torch.func.vmap(seen)(x), torch.func.grad(seen)(x), torch.func.jacrev(seen)(x)]
        results += [torch.func.hessian(seen)(x), torch.func.vmap(torch.func.grad(seen))(x)]
        results += torch.func.jvp(seen, (x,), (x,))
        assert all(result.is_cuda for result in results)
    assert set(places) == {(True, True, True)}


def test_a_branch_of_cond_is_seen_and_so_is_what_decides():
    def branch(x: Tensor) -> Tensor:
        return x.to("cpu").to("cuda")

    with Detectors(["sync", "race"], emulate_cuda=True) as detectors:
        x = torch.ones(3, device="cuda")
        assert torch.cond(x.sum() > 0, branch, torch.clone, (x,)).is_cuda
        (y,) = torch.while_loop(lambda x: x.sum() < 10, lambda x: (x + 1,), (x,))
        assert y.is_cuda
    assert [(entry.finding.rule, entry.count) for entry in detectors.findings()] == [
        ("host-read", 1), ("copy-to-host", 1), ("upload", 1), ("host-read", 4),
    ]  # fmt: skip


def test_everything_is_as_before_once_the_last_region_is_left():
    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def parts() -> list[dict[str, object]]:
        owners = sys.modules["torch._C._autograd"], torch.autograd.Variable, TorchDispatchMode, Own
        return [dict(vars(owner)) for owner in owners]

    before = parts()
    with Detectors(["sync"], emulate_cuda=True):
        with Own():
            torch.ones(2, device="cuda")
        assert all(then != now for then, now in zip(before, parts(), strict=True))
    assert parts() == before

"""Calls that wait for the device and calls that do not, each in the loop of one race: only a wait may hide it.

A pinned buffer is filled again while the upload of the step before may still read it. What stands in the loop beside
that orders the two only if it makes the host wait for the stream.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gapless import guard
from gapless.guard.emulate import emulated_cuda

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated"),
    pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN"),
]

SET_UP = """
torch.manual_seed(0)
D = dict(device="cuda")
x, y = torch.rand(4, 6, **D) + 0.1, torch.rand(4, 6, **D) + 0.1
p = torch.rand(4, 6, **D).requires_grad_()
half = torch.rand(4, 6, **D).bfloat16().requires_grad_()
square = torch.eye(4, **D) + 0.1
grid = torch.rand(2, 3, 8, 8, **D)
row = torch.rand(6, **D)
ids, labels = torch.arange(4, **D), torch.arange(4, **D) % 3
mask, rows, host_mask = x > 0.5, torch.tensor([True, False, True, False], **D), torch.tensor([True, False, True, True])
one, count = torch.tensor(2.0, **D), torch.tensor(2, **D)
model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.1), nn.Linear(6, 3)).to("cuda")
table, lstm, attend = nn.Embedding(8, 6).to("cuda"), nn.LSTM(6, 6).to("cuda"), nn.MultiheadAttention(6, 2).to("cuda")
normed = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).to("cuda")
for each in (model, table, normed):
    sum(one.sum() for one in each.parameters()).backward()
adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)
side, event, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
pinned, pageable, back = torch.zeros(6, pin_memory=True), torch.zeros(6), torch.zeros(6, pin_memory=True)
out, ints = torch.zeros(4, 6, **D), torch.arange(6, **D)
"""

NEVER_WAITS = """
x.float()
x.to("cuda")
x.to("cuda", copy=True)
x.to("cuda", torch.float16)
x.to(torch.float16, copy=True)
x.to("cuda", torch.float64, copy=True)
x.to(y)
x.type(torch.float16)
x.half(); x.bfloat16(); x.double(); x.int(); x.bool()
x.clone()
x.contiguous(memory_format=torch.contiguous_format)
x.cuda()
x.type_as(half)
p.bfloat16().sum().backward()
p.to(torch.float64).sum().backward()
p.to("cuda", torch.float16, copy=True).sum().backward()
half.float().sum().backward()
p.type(torch.float16).sum().backward()
p.cuda().sum().backward()
torch.autograd.grad(half.float().square().sum(), half)
F.layer_norm(half.float(), (6,)).to(half.dtype).sum().backward()
(half.float() * torch.rsqrt(half.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(half.dtype).sum().backward()
with torch.autocast("cuda", torch.bfloat16): model(x).sum().backward()
with torch.autocast("cuda", torch.float16): F.cross_entropy(model(x), labels).backward()
with torch.autocast("cuda", torch.bfloat16): attend(x, x, x)[0].sum().backward()
model(x).sum().backward()
F.cross_entropy(model(x), labels).backward()
checkpoint(model, p, use_reentrant=False).sum().backward()
checkpoint(model, p, use_reentrant=True).sum().backward()
with torch.autocast("cuda", torch.bfloat16): checkpoint(model, p, use_reentrant=False).sum().backward()
adam.step(); adam.zero_grad(set_to_none=False)
sgd.step()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
torch._foreach_mul_([one.grad for one in model.parameters()], 0.5)
lstm(x.unsqueeze(0))[0].sum().backward()
table(ids).sum().backward()
normed(grid).sum().backward()
normed.eval()(grid); normed.train()
attend(x, x, x, need_weights=False)
copy.deepcopy(model)
copy.deepcopy(x)
copy.copy(x)
model.state_dict()
model.load_state_dict(model.state_dict())
adam.state_dict()
list(model.parameters()); list(model.named_buffers())
model.half(); model.float()
model.to("cuda")
x.data; x.detach()
x.requires_grad
x.shape; x.stride(); x.numel(); x.device; x.is_cuda; len(x)
x.is_contiguous(); x.data_ptr(); x.untyped_storage().nbytes()
y[mask] = 0.0
y[mask] = -1
y[~mask] = float("-inf"); y.fill_(0.5)
y[rows] = 0.0
y[rows, 2] = 0.0
y[mask] = torch.tensor(1.0)
y[host_mask] = 0.0
y[:, 2] = 0.0
y[1:3] = 0.0
y[1:3] = x[1:3]
y[...] = x
y[0] = x[0]
y.masked_fill_(mask, 0.0)
y.masked_fill(mask, -1e9)
y.masked_fill(rows[:, None], 0.0)
y.masked_scatter_(mask, x)
y.masked_scatter(mask, x)
torch.where(mask, x, y)
torch.where(mask, x, 0.0)
torch.where(mask, 1.0, 0.0)
y[ids] = x
y[ids] = x[0]
y[ids, ids]
y[ids]
y[ids] += x
y[:, ids[:2]]
y[None]; y[..., 0]; y[:, None]; y[1]; y[-1, 2]; y[::2]
y.index_select(0, ids); y.index_fill_(0, ids, 0.5); y.index_add_(0, ids, x); y.index_copy_(0, ids, x)
y.index_put_((ids,), x); y.index_put((ids, ids), row[:4], accumulate=True)
y.gather(1, ids[:, None]); y.scatter_(1, ids[:, None], 0.5); y.scatter_add_(1, ids[:, None], x)
y.scatter(0, ids[None, :4].expand(1, 4), x[:1, :4]); y.scatter_reduce_(0, ids[None, :], x[:1, :4], "amax")
y.take(ids); y.put_(ids, row[:4]); y.take_along_dim(ids[:, None], 1)
torch.nonzero_static(mask, size=4)
x.sort(); x.argsort(); x.topk(2); x.kthvalue(2); x.msort()
x.sort(stable=True, dim=0)
torch.multinomial(x, 1)
torch.multinomial(x, 2, replacement=True)
torch.multinomial(x.softmax(-1), 1).squeeze(1)
torch.bernoulli(x.clamp(0, 1)); x.clone().exponential_(); torch.poisson(x); x.clone().geometric_(0.5)
torch.rand(4, **D); torch.randn(4, **D); torch.randint(0, 4, (4,), **D); torch.randperm(4, **D)
torch.rand_like(x)
torch.normal(0.0, 1.0, (4,), **D)
x.clone().normal_(); x.clone().uniform_(); x.clone().random_(0, 4); x.clone().log_normal_()
x.clone().cauchy_()
torch.manual_seed(1); torch.cuda.manual_seed_all(1)
torch.cuda.get_rng_state()
torch.Generator("cuda").manual_seed(1)
(x / torch.empty_like(x).exponential_()).argmax(-1)
x.argmax(-1); x.argmin(); x.amax(); x.aminmax(); x.max(-1); x.min(0); x.median(); x.mode()
x.sum(); x.mean(); x.std(); x.var(); x.norm(); x.prod(); x.logsumexp(-1); x.any(); x.all(); x.count_nonzero()
x.cumsum(-1); x.cumprod(0); x.cummax(0); x.logcumsumexp(0); x.diff()
x.nan_to_num(); x.nan_to_num_(0.0); x.clamp_(0.1, 2.0); x.clamp(min=one); x.isnan(); x.isfinite(); x.isinf()
x.nansum(); x.nanmean(); x.nanmedian()
x.lerp(y, 0.5); x.lerp_(y, one * 0); torch.addcmul(x, x, y); torch.addcdiv(x, x, y, value=0.5)
x @ y.T; torch.einsum("ab,cb->ac", x, y); torch.bmm(x[None], y.T[None]); x.matmul(row); torch.outer(row, row)
x.add_(0.0); x.mul_(1.0); x.sub_(0); x.div_(1.0); x.copy_(y); x.fill_(0.5); x.zero_(); x.uniform_(0.1, 1)
x + one; x * 2.0; 2 - x; x ** 2; x // 2; x % 2; -x; abs(x); x > 0.5; ~mask; mask & mask; mask | rows[:, None]
x.fill_(one); y.fill_(one)
x.view(-1); x.reshape(6, 4); x.T; x.permute(1, 0); x.expand(2, 4, 6); x.unbind(); x.chunk(2); x.split(2)
x.unfold(1, 2, 1)
x.tensor_split(2); x.tensor_split((1, 2)); torch.tensor_split(x, 3); x.split((1, 3)); x.hsplit(2)
x.roll(1); x.flip(0); x.rot90(); x.tril(); x.triu(); torch.diag(row); x.repeat(2, 1); x.tile(2)
torch.block_diag(x, x)
x.repeat_interleave(2, 0)
x.repeat_interleave(ids, 0, output_size=6)
with torch.inference_mode(): x.repeat_interleave(2, 0)
torch.cat([x, y]); torch.stack([x, y]); torch.hstack([x, y]); torch.meshgrid(row, row, indexing="ij")
F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True)
F.scaled_dot_product_attention(p[None, None], p[None, None], p[None, None]).sum().backward()
F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=torch.ones(4, 4, **D).bool())
F.embedding(ids, x); F.embedding_bag(ids, x, ids[:2]); table(ids)
F.one_hot(labels, 3)
F.one_hot(labels, num_classes=3).float()
F.cross_entropy(x, labels); F.nll_loss(x, labels); F.mse_loss(x, y); F.l1_loss(x, y)
F.smooth_l1_loss(x, y); F.huber_loss(x, y)
F.cross_entropy(x, labels, ignore_index=1, label_smoothing=0.1, reduction="none")
F.kl_div(x, y, reduction="sum")
F.binary_cross_entropy_with_logits(x, y); F.binary_cross_entropy(x.clamp(0, 1), y.clamp(0, 1))
F.cosine_embedding_loss(x, y, ids)
F.softmax(x, -1); F.log_softmax(x, -1); F.gelu(x); F.silu(x); F.relu(x, inplace=True); F.dropout(x)
F.glu(x); F.softplus(x)
F.layer_norm(x, (6,)); F.rms_norm(x, (6,)); F.group_norm(x[:, :, None], 2); F.batch_norm(x, row, row)
F.normalize(x)
F.gumbel_softmax(x, hard=True); F.pad(x, (1, 1)); F.interpolate(grid, scale_factor=2); F.unfold(grid, 2)
F.pixel_shuffle(grid[:, :1].expand(2, 4, 8, 8), 2)
F.conv2d(grid, torch.rand(3, 3, 3, 3, **D)); F.max_pool2d(grid, 2); F.avg_pool2d(grid, 2)
F.adaptive_avg_pool2d(grid, 1)
F.linear(x, y); F.bilinear(x, y, torch.rand(3, 6, 6, **D)); F.cosine_similarity(x, y)
F.pairwise_distance(x, y); torch.cdist(x, y)
torch.quantile(x, 0.5); torch.nanquantile(x, 0.5, dim=-1); x.quantile(0.9, dim=0)
torch.histc(x, 4, 0.0, 1.0)
torch.bucketize(x, row.sort()[0]); torch.searchsorted(row.sort()[0], x)
torch.isin(ids, labels); torch.isclose(x, y); torch.eq(x, y).all()
torch.zeros(4, **D); torch.ones_like(x); torch.full((4,), 0.5, **D); torch.arange(4, **D)
torch.empty(4, **D); torch.eye(3, **D); x.new_zeros(3)
torch.linspace(0, 1, 4, **D); x.new_full((3,), 1.0); x.new_empty(3); torch.tril_indices(3, 3, **D)
torch.linalg.vector_norm(x); torch.linalg.cholesky_ex(square); torch.linalg.inv_ex(square)
torch.linalg.qr(x); torch.linalg.solve_ex(square, x)
torch.linalg.lu_factor_ex(square); torch.det(square); torch.trace(square)
torch.linalg.matrix_power(square, 2)
torch.fft.rfft(x); torch.view_as_complex(x.view(4, 3, 2)); torch.polar(x, y)
torch.stft(row, 4, window=torch.ones(4, **D), return_complex=True)
torch._assert_async(x.isfinite().all())
torch._foreach_add_([x, y], 0.0); torch._foreach_norm([x, y]); torch._foreach_copy_([x], [y])
torch._amp_foreach_non_finite_check_and_unscale_([x], torch.zeros(1, **D), torch.ones(1, **D))
pinned.to("cuda", non_blocking=True)
pinned.to("cuda", torch.float16, non_blocking=True)
pinned.to(torch.device("cuda"), non_blocking=True, copy=True)
pinned.cuda(non_blocking=True)
row.copy_(pinned, non_blocking=True)
back.copy_(row, non_blocking=True)
row.to("cpu", non_blocking=True)
row.to("cpu", torch.float64, non_blocking=True)
row.copy_(pageable, non_blocking=True)
pageable.to("cuda", non_blocking=True)
torch.zeros(0, **D).cpu(); torch.zeros(0).cuda()
pinned.sum().item(); pageable.tolist(); pageable[pageable > 0]; pageable.nonzero(); pageable[0] = 1.0
pageable.unique()
torch.tensor([1, 2]); torch.tensor(3.0).item(); torch.as_tensor([1.0])
with torch.cuda.stream(side): torch.zeros(4, **D).add_(1)
side.wait_stream(torch.cuda.current_stream()); torch.cuda.current_stream().wait_stream(side)
event.record(); side.wait_event(event); torch.cuda.current_stream().wait_event(event)
done.record(); event.record(side); event.synchronize()
with torch.cuda.stream(side): torch.zeros(4, **D).sum().item()
side.synchronize()
side.query()
event.record(); event.query()
torch.cuda.current_stream().query()
event.record(torch.cuda.current_stream()); bool(event.query())
torch.cuda.memory_allocated(); torch.cuda.max_memory_allocated(); torch.cuda.mem_get_info()
torch.cuda.current_device(); torch.cuda.get_device_properties(0); torch.cuda.is_available()
x.untyped_storage(); x.storage_offset(); torch.is_tensor(x); x.element_size(); x.layout
torch.vmap(lambda one: one * 2)(x)
torch.func.grad(lambda one: one.square().sum())(x)
torch.nn.utils.parameters_to_vector(model.parameters())
torch.set_grad_enabled(True); torch.no_grad().__enter__(); torch.set_grad_enabled(True)
nn.utils.rnn.pad_sequence([row, row[:3]])
torch.distributions.Categorical(logits=x, validate_args=False).sample()
with torch.no_grad(): model(x)
with torch.inference_mode(): model(x)
with torch.inference_mode(): y2 = x * 1; y2[mask] = 0.0; y2.to("cuda", copy=True); F.one_hot(labels, 3)
with torch.inference_mode(): x.float().half().float(); x.to("cuda", torch.float16); F.cross_entropy(x, labels)
x.record_stream(side)
pinned.pin_memory(); pinned.is_pinned()
half.index_select(0, ids).sum().backward(); half[ids].sum().backward(); half[1:3].sum().backward()
half.gather(1, ids[:, None]).sum().backward(); torch.cat([half, half]).sum().backward()
half.topk(2)[0].sum().backward()
half.masked_fill(mask, 0.0).sum().backward(); torch.where(mask, half, half).sum().backward(); half.max().backward()
half.cumsum(0).sum().backward(); half.softmax(-1).sum().backward()
half.prod(-1).sum().backward()
half.std().backward()
F.embedding(ids, p).float().sum().backward(); (half @ half.T).float().sum().backward()
with torch.autocast("cuda", torch.float16): F.mse_loss(model(x), torch.zeros(4, 3, **D)).backward()
torch.optim.Adam(model.parameters(), foreach=False).step(); torch.optim.RMSprop(model.parameters()).step()
torch.optim.Adam(model.parameters(), amsgrad=True).step(); torch.optim.Adam(model.parameters(), fused=True)
torch.optim.swa_utils.AveragedModel(model)
torch.amp.GradScaler("cuda").scale(model(x).sum()).backward()
torch.func.functional_call(model, dict(model.named_parameters()), (x,))
torch.autograd.functional.jacobian(torch.sum, x)
nn.GRU(6, 6, device="cuda")(x[None]); nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, device="cuda")(x[None])
x.index_put_((mask,), torch.tensor(0.0)); x.where(mask, torch.zeros((), **D)); x[..., -1] += 1; x[1:, :] *= 2
x.select_scatter(row, 0, 1); x.slice_scatter(y[:2], 0, 0, 2); x.diagonal_scatter(row[:4])
x.to(x.device); x.to(0); x.to("cuda:0"); x.cuda(0); x.to(device="cuda", dtype=torch.float16, non_blocking=True)
grid.to(memory_format=torch.channels_last); grid.contiguous(memory_format=torch.channels_last)
nn.Linear(6, 6, device="cuda"); nn.init.xavier_uniform_(model[0].weight)
""".strip().splitlines()

WAITS = """
x.sum().item()
float(x.sum())
bool(x.any())
if x.any(): pass
count.__index__()
x[: count]
range(count)
x.tolist()
x.cpu()
x.to("cpu")
x.to("cpu", torch.float16)
x.cpu().numpy()
x.numpy()
repr(x)
f"{x.sum():.2f}"
back.copy_(row)
pageable.copy_(row)
pageable.copy_(row, non_blocking=True)
row.copy_(pinned)
row.copy_(pageable)
pageable.to("cuda")
pinned.to("cuda")
pageable.cuda()
torch.tensor([1.0, 2.0], device="cuda")
torch.as_tensor([1.0], device="cuda")
x.new_tensor([1.0])
torch.tensor([x.sum(), 1.0])
y[0, 0] = 1.0
y[ids] = 0.0
y[[0, 1]]
y[torch.tensor([0, 1])]
y[rows]
y[mask]
y[mask] = x[mask]
y[rows] = x[:2]
y[mask] = one
x[mask].sum()
x.nonzero(); 
torch.nonzero(mask)
torch.argwhere(mask)
torch.where(mask)
x.masked_select(mask)
labels.unique()
labels.unique_consecutive()
labels.bincount()
x.repeat_interleave(ids, 0)
x.histc(4)
torch.equal(x, y)
torch.allclose(x, y)
x.tensor_split(torch.tensor([1, 2], device="cuda").cpu())
F.one_hot(labels)
torch.linalg.svd(x)
torch.linalg.eigh(square)
torch.linalg.inv(square)
torch.linalg.solve(square, x)
torch.linalg.cholesky(square)
torch.linalg.lstsq(square, x)
torch.linalg.pinv(x)
torch.isclose(x, y).all().item()
torch.full((2,), one, device="cuda")
y.masked_fill_(mask, one)
x.cov()
nn.init.trunc_normal_(torch.empty(4, 6, **D))
y.index_fill_(0, ids, one)
p.grad = None; p[mask].sum().backward()
torch.save(x, io.BytesIO())
y[y > 0.7] *= 1.0
torch.cuda.synchronize()
torch.cuda.current_stream().synchronize()
event.record(); event.synchronize()
event.record(); [None for _ in iter(event.query, True)]
[None for _ in iter(torch.cuda.current_stream().query, True)]
done.record(); side.wait_event(done); side.synchronize()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
torch.distributions.Categorical(logits=x, validate_args=True)
with torch.inference_mode(): x.sum().item()
with torch.inference_mode(): x.argwhere()
with torch.inference_mode(): x.repeat_interleave(ids, 0)
""".strip().splitlines()


def names_of_lines() -> dict[str, object]:
    return {"torch": torch, "nn": nn, "F": F, "copy": copy, "io": io, "checkpoint": checkpoint}


def hidden_by(lines: list[str]) -> list[str]:
    """Return the lines beside which the race is not found."""
    names = names_of_lines()
    with emulated_cuda(), guard.no_sync(mode="record"):
        exec(SET_UP, names)
        return [line for line in lines if not race_is_found(line, names)]


def race_is_found(line: str, names: dict[str, object]) -> bool:
    call = compile(line, line, "exec")
    with guard.no_race("record", track="all") as checker:
        exec(call, names)
        torch.cuda.synchronize()
        host = torch.zeros(4, pin_memory=True)
        for step in range(3):
            host.fill_(step)
            host.to("cuda", non_blocking=True)
            exec(call, names)
    return any(race.second.stack and race.second.stack[0].file == __file__ for race in checker.races)


def test_a_race_is_found_beside_all_that_does_not_wait():
    assert hidden_by(NEVER_WAITS) == []


def test_the_race_is_none_where_the_line_beside_it_waits():
    assert sorted(set(WAITS) - set(hidden_by(WAITS))) == []


@pytest.mark.parametrize("upload", ['to("cuda", torch.float16, non_blocking=True)', "cuda(non_blocking=True)"])
def test_an_upload_that_converts_reads_pinned_memory_as_the_stream(upload):
    with emulated_cuda(), guard.no_sync(mode="record"), guard.no_race("record", track="all") as checker:
        host = torch.arange(6.0).reshape(2, 3).pin_memory()
        device = eval(f"host.{upload}")
        assert device.is_cuda and device.stride() == (3, 1) and device.tolist() == [[0, 1, 2], [3, 4, 5]]
        eval(f"host.{upload}")
        host.zero_()
    assert [race.second.verb for race in checker.races] == ["writes"]


def test_an_upload_keeps_type_form_and_gradient():
    with emulated_cuda(), guard.no_sync(mode="record"):
        host = torch.rand(2, 3, 4, 4, requires_grad=True)
        up = host.to("cuda", torch.float64, memory_format=torch.channels_last)
        assert up.dtype is torch.float64 and up.is_contiguous(memory_format=torch.channels_last)
        up.sum().backward()
        assert host.grad is not None and host.grad.dtype is torch.float32 and not host.grad.is_cuda
        assert host.to(up).dtype is torch.float64 and host.detach().to(up).is_cuda
        assert torch.ones(3).to("cuda", torch.int64).dtype is torch.int64

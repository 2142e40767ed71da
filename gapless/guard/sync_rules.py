"""The table of all ways of making the host wait; the modes, the wrapped functions and the lint use it."""

from __future__ import annotations

from typing import NamedTuple


class SyncRule(NamedTuple):
    """`row` counts the entries of the catalogue of hidden syncs, from 1; 0 is a rule of our own."""

    id: str
    row: int
    what: str
    why: str
    instead: str


RULES: dict[str, SyncRule] = {rule.id: rule for rule in (
    SyncRule(
        "host-read", 1, "a value of a device tensor is read on the host: item, tolist, int, float, bool, print, equal",
        "the bytes are copied to the host, and the host waits for all work queued before them",
        "keep it on the device: torch.where, masks, scatter; copy results into pinned memory, and wait for a fence",
    ),
    SyncRule(
        "host-size", 2, "a maximum or sum of a device tensor is read to size something",
        "the host waits for the reduction and all work before it",
        "carry an upper bound on the host beside the batch, and clamp or mask on the device",
    ),
    SyncRule(
        "copy-to-host", 3, "a device tensor is copied to host memory: cpu, numpy, to('cpu'), copy_ into a host tensor",
        "the copy ends before the call returns, so the host waits for all work queued before it",
        "copy into preallocated pinned memory with non_blocking=True, and read it after an event",
    ),
    SyncRule(
        "host-index", 4, "a device scalar is used as a Python index: a slice bound, range(), list[t]",
        "Python asks the tensor for an integer, and the host waits for it",
        "slice by a host bound and mask the rest on the device",
    ),
    SyncRule(
        "scalar-assign", 5, "one element of a device tensor is assigned: t[i] = value",
        "the value becomes a CPU tensor of the element's shape, which is a blocking copy to the device",
        "assign a slice, t[i:i+1] = value, or call fill_: both are kernels that carry the value",
    ),
    SyncRule(
        "list-to-device", 6, "torch.tensor, as_tensor, new_tensor or ctc_loss makes a device tensor of host data",
        "the data goes into pageable memory, and the copy from there blocks",
        "write into a preallocated pinned slot and copy with non_blocking=True; zeros, full and arange are kernels",
    ),
    SyncRule(
        "upload", 6, "host memory is copied to the device by a blocking copy: to(device), cuda(), copy_",
        "the host waits until the copy is done, and with it for all work queued before",
        "copy from a preallocated pinned buffer with non_blocking=True, and reuse the buffer after an event",
    ),
    SyncRule(
        "index-by-host", 7, "a device tensor is indexed by a list, a numpy array or a CPU tensor",
        "the index is uploaded by a blocking copy at every call",
        "upload the index once with the step's other inputs, then index_select or gather",
    ),
    SyncRule(
        "index-put-scalar", 7, "t[device_index] = number",
        "the number becomes a CPU tensor and is uploaded by a blocking copy",
        "t.index_fill_(dim, index, number), or a masked_fill_",
    ),
    SyncRule(
        "data-size", 8, "the result's size depends on device data: nonzero, argwhere, where(mask), masked_select",
        "the host must know the size before it can allocate the result",
        "three-argument where, masked_fill_, masked_scatter_, nonzero_static, or a prefix sum and a scatter",
    ),
    SyncRule(
        "mask-index", 8, "a device tensor is indexed by a device mask: x[m], x[m] = tensor",
        "the mask goes through nonzero, and the host waits for the number of hits",
        "torch.where(m, a, b), masked_fill_, masked_scatter_, or compute every position and slice on the host later",
    ),
    SyncRule(
        "repeat-interleave", 9, "repeat_interleave by a device tensor without output_size",
        "the repeats are summed on the device and the sum is read to size the result",
        "pass output_size=, a count that the host knows",
    ),
    SyncRule(
        "counted-size", 9, "bincount, unique, unique_consecutive, or histc with an automatic range",
        "the size or range of the result is found on the device and read by the host",
        "scatter_add_ into a fixed number of bins; histc with min and max",
    ),
    SyncRule(
        "device-split", 9, "a tensor is split at sizes that lie on the device",
        "the sizes are read on the host",
        "keep the lengths on the host, or index with offsets on the device",
    ),
    SyncRule(
        "type-hop", 11, "a device tensor is converted to a CPU tensor type: .type(torch.BoolTensor)",
        "the type names CPU memory, so this is a blocking copy to the host",
        ".bool(), .long(), .to(dtype): the same conversion on the device",
    ),
    SyncRule(
        "pageable-async", 12, "a non_blocking copy to the device from memory that is not pinned",
        "the driver stages it: small ones hide a race, large ones block although non_blocking was asked for",
        "copy from a preallocated pinned buffer",
    ),
    SyncRule(
        "gapped-async", 12, "a non_blocking copy of a host tensor whose elements have gaps between them",
        "torch packs it first, into memory that is not pinned, and blocks",
        "pack it into a dense pinned buffer on the host",
    ),
    SyncRule(
        "unpinned-download", 12, "a non_blocking copy from the device into memory that is not pinned",
        "it blocks, or the host reads it before it has arrived",
        "a preallocated pinned destination, read after an event",
    ),
    SyncRule(
        "pinned-alloc", 13, "pinned memory is allocated again and again: pin_memory, to('cpu', non_blocking=True)",
        "a miss of the host allocator's cache asks the driver: milliseconds, and the device may wait too",
        "allocate a ring of pinned buffers once, before serving",
    ),
    SyncRule(
        "allocator-growth", 14, "the caching allocator took or gave back device memory within the region",
        "the driver's allocations and frees, such as cudaMalloc, wait for the whole device",
        "allocate everything before the loop; keep shapes and lifetimes the same from step to step",
    ),
    SyncRule(
        "empty-cache", 14, "torch.cuda.empty_cache",
        "the driver's frees wait for the whole device, and the next allocation pays again",
        "leave the cache alone while work is running",
    ),
    SyncRule(
        "event-wait", 15, "the host waits for an event",
        "it waits until the device gets there; the default event spins and holds a core and a driver lock",
        "order streams with wait_event; wait in one place outside the launch path, on a blocking event",
    ),
    SyncRule(
        "event-poll", 15, "an event is queried over and over",
        "each query takes the driver's lock, which delays other threads' launches",
        "query once a turn, or wait on another thread",
    ),
    SyncRule(
        "stream-wait", 15, "the host waits for a stream or for the whole device: synchronize",
        "it waits until everything queued there is done",
        "record an event and wait for that one, elsewhere; order streams with wait_stream",
    ),
    SyncRule(
        "slow-call", 16, "a call that should only enqueue took long",
        "the launch queue is full, a kernel is compiled or loaded for the first time, or a library sets itself up",
        "cap the steps in flight, warm every shape before serving, one graph launch a step",
    ),
    SyncRule(
        "collective", 17, "a collective of Python objects, or a barrier",
        "it copies through the host and waits for every rank",
        "a side channel on the CPU at a bounded rate, and device collectives that were warmed up",
    ),
    SyncRule(
        "graph-capture", 18, "a CUDA graph is captured",
        "capture waits for the device, and instantiation takes milliseconds",
        "capture every graph before serving",
    ),
    SyncRule(
        "gc-pause", 21, "Python's garbage collector ran for long",
        "a full collection stops this thread for up to hundreds of milliseconds",
        "gc.freeze() after start-up, and make no cyclic garbage in the loop",
    ),
    SyncRule(
        "host-operand", 0, "an operation mixes a device tensor with a host tensor",
        "a real device refuses it, or uploads the host tensor by a blocking copy",
        "make the tensor on the device (device=other.device), or upload it with the step's other inputs",
    ),
    SyncRule(
        "device-sync", 0, "torch itself reports a synchronising call",
        "the host waits for the device inside this call",
        "find the host read, the blocking copy or the unknown size in this line",
    ),
)}  # fmt: skip
"""The rules by their ids."""

WAITING = frozenset((
    "host-read", "host-size", "copy-to-host", "host-index", "scalar-assign", "list-to-device", "upload",
    "index-by-host", "index-put-scalar", "data-size", "mask-index", "repeat-interleave", "counted-size",
    "device-split", "type-hop", "unpinned-download",
))  # fmt: skip
"""Rules of calls that return after all work that was queued before them on the current stream."""

COLLECTIVES = tuple(("torch.distributed", name, "collective") for name in (
    "all_gather_object", "barrier", "broadcast_object_list", "gather_object", "monitored_barrier",
    "scatter_object_list",
))  # fmt: skip

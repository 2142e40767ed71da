"""The failures that overlapped engines shipped, by row: class, where it was seen, and what went wrong in a few words.

Numbers without a name are threads of vLLM. Rows L1 to L10 are lifetime bugs, each of them silent corruption.
"""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    kind: str
    seen: str
    what: str


_TABLE = """
1 | staging | #24527 | pinned inputs rewritten while their copy to the device is pending
2 | staging | #25279 | the same for sampling tensors, outside the guarded scope
3 | staging | #28706, #28579, #31373, #30624 | preprocessing of images outside the guard; a later change took it back
4 | staging | #31679, #31841 | mask of multimodal embeddings overwritten under load
5 | staging | #34619, #34866 | dummy steps of idle ranks write the shared buffers outside the protocol
6 | staging | #47644, #38476 | the guarding event exists only in asynchronous mode, but another feature overlaps too
7 | staging | #54269 | reused input buffers without a guard; ranks diverge and hang
8 | staging | #53057 | steps without tokens are taken as done without a wait
9 | staging | #29288 | the drafter's host buffer is reused
10 | staging | #32799 | attention metadata in reused pinned buffers
11 | staging | #48901, #48214, #37775 | the one input buffer on the device overwritten before it is read
12 | staging | #48085, #48399 | persistent index buffer of the page zeroer reused
13 | staging | #42603 | metadata of the draft loop rewritten in flight
14 | mirror | #45673, #45383 | only the first row of prompt embeddings is right
15 | mirror | #45100 | accepted counts copied late, onto rows swapped meanwhile
16 | mirror | #38556, #38098 | optimistic sequence lengths used for recurrent state
17 | mirror | #51571, #51599 | counts land on rows that were moved
18 | order | #53613, #50021, #53726 | page tables rewritten while work behind the forward reads them
19 | mirror | vllm-ascend #13863, #13864 | row reused before what is in flight is mapped
20 | mirror | vllm-ascend #10032 | context-parallel metadata from optimistic lengths
21 | unknown | #52873 | draft acceptance dies past a position, also without overlap
22 | mirror | #37150 | the drafter sees a stale history
23 | order | #24799 | draft preparation overlaps the next step's preparation
24 | placeholder | #26467, #27878, #27910 | penalties count placeholders
25 | placeholder | vllm-gaudi #1761, #1769 | repetition penalty without effect
26 | placeholder | #52461 | custom processors see placeholders
27 | placeholder | #40768, #43434, #46899, #37159, #44734, #32303 | ids of -1 reach the embedding
28 | placeholder | #27756, #26385 | wrong token after a step that a request missed
29 | placeholder | #28787 | known tokens cut under chunked prefill and preemption
30 | placeholder | #30142, #47900, #48245 | stale frames drain counters that a preemption reset
31 | placeholder | #46066, #42117, #42043 | fixed discard count after pause and cleared cache
32 | placeholder | #49860 | a stop is seen one or two steps late
33 | placeholder | #57562 | counter below zero under chunked prefill and concurrency
34 | placeholder | #49620, #41190 | a frame of a speculative step counted as one token
35 | placeholder | vllm-gaudi #1794 | valid frames thrown away, three times the preemptions
36 | placeholder | #27922, #29542 | a wasted step for every request
37 | identity | #42492, #42523 | an id reused, outputs bound by name to the new request
38 | identity | #29355, #27987 | an id reused while the old request is in an extra step
39 | identity | #42157, #42158, #25991 | a look-up that fails in an abort race kills the engine
40 | identity | #42655, #42760, #41177 | row map of the worker out of step after two resumes
41 | identity | #47724 | a request served with another tenant's adapter
42 | lifetime | #33377 | double free on abort during a KV transfer
43 | lifetime | #45357, #45096, #37285, #42182 | block freed for the network while the next step writes it
44 | order | #48481 | queued zeroing overwrites KV that was loaded
45 | lifetime | #47728, #47282, vllm-ascend #13501 | window pruning frees blocks that are still read
46 | lifetime | vllm-ascend #14055 | pages of finished and preempted requests freed without a fence
47 | order | #46278, #45704 | store to the host before the compute that it copies
48 | order | #47324, #50863 | load overwrites a block that is being read
49 | order | #31341 | unfinished KV offloaded
50 | mirror | #33881, #27648 | block hashes lag behind, decoded tokens are never offloaded
51 | mirror | LMCache #1898, #2356 | placeholders saved as computed KV; finished twice
52 | lifetime | #46014, #39702 | preempted and admitted again with transfers alive
53 | order | #29608 | full-graph replay reads half-loaded KV
54 | lifetime | #45347, #39544, #38551, #32469 | encoder output freed on an optimistic count
55 | order | #38907 | encoder output freed before the gather of the same step
56 | lifetime | vllm-ascend #17195 | free needs progress, and progress needs the free
57 | lifetime | #29623 | device tensors of an output dropped under the copy stream
58 | order | #31570, #31584, #36942 | host reads before the copy is done
59 | event | #39115 | one event re-recorded, outputs one step late
60 | event | #53960, #53899 | one event for a connector with two batches in flight
61 | event | #47081 | spinning waits hold the driver's lock
62 | event | #42897 | hang in a wait for an event
63 | collective | #28774 | a rank without tokens leaves the collective early
64 | collective | #38726, vllm-ascend #8468 | dummy tokens broadcast on one side only
65 | collective | #40926 | no tokens, idle device, healthy metrics
66 | collective | tenstorrent #387, #394, #395, #396 | next step submitted before the previous ids are applied
67 | collective | qualcomm #40 | launch waits for what waits for the launch
68 | event | vllm-ascend #4233 | record executed before the replay of the step in front
69 | placeholder | #52071 | a field that only the asynchronous scheduler sets
70 | grammar | #45014, #45015, #56250 | next tokens scheduled before the grammar advanced
71 | grammar | #49694, #49738 | host and worker disagree on draft lengths, masks shift
72 | grammar | #54437 | rows without a mask are sampled unconstrained
73 | grammar | #29379, #30916 | stale draft ids after preemption
74 | grammar | tt-xla #3706 | constraints lost with an old order of hooks
75 | identity | #31588, #28589, #31128 | a failed step shows as a missing attribute
76 | order | #56347 | crash in captured decode steps on one vendor's device
77 | collective | #25777, #28621 | crash of two-batch overlap with disaggregation
78 | mirror | #27615, #38711, vllm-ascend #7861 | logprobs sliced wrong with several tokens a step
79 | sync | #22760 | reading tokens waits for other streams
80 | sync | #36723, #41434, #31336, #25884, #37239 | asynchrony lost without a word
81 | identity | sglang-jax #1487, #1504 | ring of future tokens wraps at high concurrency
82 | lifetime | sglang #18744, #18746, #18803, mini-sglang #89 | pool row freed while the forward reads it
83 | identity | sglang #8056 | two threads share a list of output ids
84 | mirror | tt-metal #51981 | seed counter tied to the host's position
85 | lifetime | NeMo-RL #4018 | prefix cache kept over a weight update
L1 | lifetime | sglang #26380, #28363, #31687 | scheduler writes page table rows while the forward reads them
L2 | lifetime | sglang #27967, #36054, #38258 | the same on another vendor's device: barrier tied to the kind
L3 | lifetime | mini-sglang #58, #67, #103 | pinned buffer of an attention plan rewritten by the next plan
L4 | lifetime | #45357, vllm-ascend #13501, #14055 | pages refilled over the network while a step is in flight
L5 | lifetime | #49674 | deferred frees make preemption free nothing, and cascade
L6 | lifetime | sglang #24527, #24580, #32564, #35049 | decode aborts, the sender still writes into the pages
L7 | lifetime | #45704, #46278, #31341 | store to the host reads KV before compute wrote it
L8 | lifetime | tokasaurus | unknown; cured by a full synchronisation of all tensor-parallel ranks
L9 | lifetime | #27878 | penalties read a list that the host no longer keeps
L10 | lifetime | sglang stream pool | two streams that are the same one
"""


def _read(table: str) -> dict[str, Failure]:
    lines = [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]
    return {row: Failure(kind, seen, what) for row, kind, seen, what in lines}


FAILURES = _read(_TABLE)
"""By row: "1" to "85", then "L1" to "L10"."""

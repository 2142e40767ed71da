"""The C++ operators refuse tensors that do not fit together: a kernel would read or write beyond them."""

from __future__ import annotations

import pytest
import torch
from kernels.native_kernels import load_native

from gapless.kernels import layout as L
from gapless.kernels.kinds import Activation
from gapless.kernels.matrix import dense
from gapless.kernels.views import Attend

T, Q, K, D, PAGE, ROWS, VOCAB, WIDTH = 3, 4, 2, 16, 8, 5, 40, 2


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def longs(*shape):
    return torch.zeros(*shape, dtype=torch.int64)


def cache(kv_heads=K, dim=D, dtype=torch.float32, layers=2):
    return torch.zeros(6, layers, 2, PAGE, kv_heads, dim, dtype=dtype)


TABLES = {"state": ints(ROWS, L.STATE_COLUMNS), "params": ints(ROWS, L.PARAM_COLUMNS), "history": ints(ROWS, 24)}
SHORT = {name: table[:-1].clone() for name, table in TABLES.items()}
NARROW = {name: table[:, :3].clone() for name, table in TABLES.items()}
CACHE = {"cache": cache(), "layer": 1}
KV = CACHE | {"page_table": ints(ROWS, 3), "scales": None, "rows": longs(T), "kv_lens": longs(T) + 1}
KV |= Attend(1.0)._asdict()
CHUNKS = KV | {"q": torch.ones(9, Q, D), "starts": torch.tensor([0, 2, 4, 9]), "spans": None, "max_query": 5}
ROPE = CACHE | {
    "qkv": torch.ones(T, Q + 2 * K, D), "qk_norm": torch.ones(Q + K, D), "eps": 1e-6, "angles": torch.ones(T, D),
    "slots": longs(T), "scales": None,
}  # fmt: skip
FP8, K8V4 = cache().to(torch.float8_e4m3fn), torch.zeros(6, 2, 1, PAGE, K, D * 3 // 2 + 4, dtype=torch.uint8)
SCALES = torch.ones(2, 2)
NO_CACHE = [
    {"cache": cache(dim=8)}, {"cache": cache(dim=32)}, {"cache": cache(kv_heads=3)}, {"cache": cache(dtype=torch.half)},
    {"cache": cache()[0]}, {"layer": 2}, {"layer": -1}, {"scales": SCALES}, {"cache": FP8}, {"cache": K8V4},
    {"cache": FP8, "scales": torch.ones(2)}, {"cache": FP8, "scales": torch.ones(1, 2)},
    {"cache": FP8, "scales": SCALES.double()}, {"cache": FP8, "scales": SCALES.t()},
    {"cache": FP8[..., :8].contiguous(), "scales": SCALES}, {"cache": FP8[:, :, :1].contiguous(), "scales": SCALES},
    {"cache": FP8.view(torch.uint8), "scales": SCALES}, {"cache": K8V4[..., :D].contiguous(), "scales": SCALES},
    {"cache": FP8.view(torch.float8_e5m2), "scales": SCALES}, {"cache": K8V4, "scales": torch.ones(3, 2)},
    {"cache": K8V4.repeat(1, 1, 2, 1, 1, 1), "scales": SCALES},
    {"cache": cache(dtype=torch.int8), "scales": SCALES},
]  # fmt: skip
NO_KV = [
    *NO_CACHE, {"page_table": ints(ROWS, 3)[0]}, {"kv_lens": longs(T) + 3 * PAGE + 1}, {"kv_lens": longs(T - 1)},
    {"rows": longs(T) + ROWS}, {"rows": longs(T) - 1}, {"page_table": ints(ROWS, 0)},
]  # fmt: skip
NO_KIND = [
    {"reach": 3}, {"reach": -1}, {"reach": 1, "size": 0}, {"softcap": -1.0}, {"scale": 0.0},
    {"sinks": torch.ones(Q - 1)}, {"sinks": torch.ones(Q).double()},
]  # fmt: skip
NO_TABLES = [{name: table} for tables in (SHORT, NARROW) for name, table in tables.items()]
DECODED = {"words": ints(60), "count": 4, "places": 1, "writes": 2, "page_size": PAGE, "pages": ints(ROWS, 3)}
DECODED |= {name: TABLES[name] for name in ("state", "history")}
FINISH = TABLES | {
    "words": ints(60), "rows": ints(4), "sizes": ints(4), "tokens": longs(3, WIDTH),
    "finite": torch.ones(3, dtype=bool), "lines": ints(2, 4 * L.line_words(WIDTH)), "out": ints(3, WIDTH),
}  # fmt: skip
SAMPLE = {name: TABLES[name] for name in ("state", "params")} | {
    "logits": torch.ones(4, VOCAB), "rows": ints(4), "masks": ints(ROWS, 1, 2), "adjusted": torch.ones(1, 3, VOCAB),
}  # fmt: skip
CUT = {name: value for name, value in SAMPLE.items() if name != "adjusted"} | {"index": ints(2)}
ADJUST = TABLES | {
    "logits": torch.ones(4, VOCAB), "index": ints(2), "rows": ints(4), "wishes": ints(3, L.WISH_WORDS),
    "counts": ints(3, VOCAB), "counted": ints(3, 1), "adjusted": torch.ones(1, 3, VOCAB),
}  # fmt: skip
MASK = TABLES | {"index": ints(2), "rows": ints(4), "mail": ints(ROWS, 128)}
SUFFIXES = ints(2, 9, L.SUFFIX_WORDS)
PAIRS = torch.ones(T, D)

CASES = [
    ("rope_and_write", ROPE, [
        *NO_CACHE, {"qkv": torch.ones(T, Q + 2 * K, 8)}, {"qkv": torch.ones(T, 2 * K, D)},
        {"qk_norm": torch.ones(Q, D)}, {"angles": torch.ones(T, 8)}, {"slots": longs(T - 1)},
        {"angles": torch.ones(1, D)}, {"angles": torch.ones(T, D).half()}, {"qk_norm": torch.ones(Q + K, D).half()},
    ]),
    ("angles", {"positions": longs(T), "table": torch.ones(9, D)}, [
        {"table": torch.ones(0, D)}, {"table": torch.ones(D)}, {"table": torch.ones(9, D).half()},
        {"positions": longs(1, T)},
    ]),
    ("decode_attention", KV | {"q": torch.ones(T, Q, D)}, [
        *NO_KV, {"q": torch.ones(T, Q, 8)}, {"q": torch.ones(T, 3, D)}, {"q": torch.ones(T + 1, Q, D)}, *NO_KIND,
    ]),
    *[(f"{kind}prefill_attention", CHUNKS, [
        *NO_KV, {"q": torch.ones(9, Q, 32)}, {"q": torch.ones(8, Q, D)}, {"starts": torch.tensor([0, 4, 9])},
        {"spans": ints(8, 2)}, {"spans": ints(9, 3)}, *NO_KIND,
    ]) for kind in ("", "invariant_")],
    ("rms_norm", {"x": PAIRS, "weight": torch.ones(D), "eps": 1e-6}, [{"weight": torch.ones(8)}, {"x": torch.ones(D)}]),
    ("add_rms_norm", {"x": torch.ones(T, D), "delta": PAIRS, "weight": torch.ones(D), "eps": 1e-6}, [
        {"weight": torch.ones(8)}, {"delta": torch.ones(T, 8)}, {"delta": torch.ones(T - 1, D)},
    ]),
    ("activate", {"x": PAIRS, "kind": 0, "gated": True}, [
        {"x": torch.ones(T, 7)}, {"x": torch.ones(D)}, {"kind": len(Activation)}, {"kind": -1},
    ]),
    ("layer_norm", {"x": PAIRS, "weight": torch.ones(D), "bias": torch.ones(D), "eps": 1e-5}, [
        {"weight": torch.ones(8)}, {"bias": torch.ones(8)}, {"bias": torch.ones(D).half()}, {"x": torch.ones(D)},
    ]),
    ("join", {"a": PAIRS, "b": PAIRS}, [{"b": torch.ones(T, 8)}, {"b": PAIRS.half()}, {"a": torch.ones(D, T).t()}]),
    ("adapt", {
        "x": PAIRS, "y": torch.ones(T, 6), "slots": longs(T), "down": torch.ones(2, 4, D), "up": torch.ones(2, 4, 6),
        "ends": [6],
    }, [
        {"slots": longs(T - 1)}, {"y": torch.ones(T - 1, 6)}, {"y": torch.ones(T, 8)}, {"x": torch.ones(T, 8)},
        {"up": torch.ones(1, 4, 6)}, {"down": torch.ones(2, 3, D)},
    ]),
    ("begin_decode", DECODED, [
        {"words": ints(L.HEADER_WORDS)}, {"history": SHORT["history"]}, {"pages": ints(ROWS - 1, 3)},
        {"state": NARROW["state"]}, {"places": 0},
    ]),
    ("begin_mixed", DECODED | TABLES | {"words": ints(300), "decode": 2, "admissions": 1, "tokens": 9}, [
        *NO_TABLES[:5], {"words": ints(60)}, {"decode": 5}, {"pages": ints(ROWS - 1, 3)},
    ]),
    ("finish", FINISH, [
        *NO_TABLES[:5], {"tokens": longs(5, WIDTH)}, {"finite": torch.ones(2, dtype=bool)}, {"sizes": ints(3)},
        {"out": ints(2, WIDTH)}, {"lines": ints(2, L.LINE_TOKENS)},
    ]),
    ("accept", {
        "tokens": longs(4), "finite": torch.ones(4, dtype=bool), "rows": ints(2), "width": 2,
        "state": TABLES["state"], "history": TABLES["history"],
    }, [
        {"finite": torch.ones(3, dtype=bool)}, {"rows": ints(3)}, {"width": 1}, {"history": SHORT["history"]},
    ]),
    ("look_up", TABLES | {"rows": ints(2), "most": 2, "shortest": 1, "longest": 3}, NO_TABLES[:5]),
    ("remember", TABLES | {"rows": ints(2), "tokens": ints(2, WIDTH) - 1, "suffixes": SUFFIXES}, [
        *NO_TABLES[:5], {"tokens": ints(1, WIDTH)}, {"suffixes": ints(2, 9, 3)}, {"suffixes": SUFFIXES[:, :1].clone()},
    ]),
    ("recall", TABLES | {"rows": ints(2), "same": ints(2), "suffixes": SUFFIXES, "most": 2, "factor": 1, "least": 1}, [
        *NO_TABLES[:5], {"same": ints(1)}, {"suffixes": ints(2, 9, 3)},
    ]),
    ("score", {
        "logits": torch.ones(4, VOCAB), "index": ints(2), "words": ints(60), "tokens": ints(4, 1),
        "state": TABLES["state"], "outboxes": ints(2, 500), "start": 0, "width": 3,
    }, [
        {"logits": torch.ones(VOCAB)}, {"words": ints(L.HEADER_WORDS)}, {"outboxes": ints(2, 4)},
        {"tokens": ints(0, 1)},
    ]),
    ("sample", SAMPLE, [
        *NO_TABLES[:2], *NO_TABLES[3:5], {"masks": ints(ROWS, 1, 1)}, {"masks": ints(ROWS - 1, 1, 2)},
        {"params": TABLES["params"] + 1, "masks": ints(ROWS, 0, 2)},
        {"adjusted": torch.ones(1, 3, VOCAB - 1)}, {"adjusted": torch.ones(0, 3, VOCAB)},
    ]),
    ("cut", CUT, [*NO_TABLES[:2], *NO_TABLES[3:5], {"masks": ints(ROWS, 1, 1)}, {"masks": ints(2, 1, 2)}]),
    ("draft", {
        "logits": torch.ones(4, 8), "ids": longs(8), "rows": longs(4), "place": 0, "vocab": VOCAB,
        "state": TABLES["state"], "params": TABLES["params"],
    }, [*NO_TABLES[:2], *NO_TABLES[3:5], {"ids": longs(7)}, {"rows": longs(3)}, {"vocab": 7}]),
    ("adjust", ADJUST, [
        *NO_TABLES[:5], {"wishes": ints(3, 5)}, {"counts": ints(3, 8)}, {"counted": ints(2, 1)},
        {"rows": ints(2)}, {"adjusted": torch.ones(1, 2, VOCAB)}, {"adjusted": torch.ones(1, 3, 8)},
    ]),
    ("mask", MASK | {"masks": ints(ROWS, 1, 2), "places": 1}, [
        *NO_TABLES[:5], {"masks": ints(ROWS - 1, 1, 2)}, {"places": 2}, {"mail": ints(ROWS - 1, 128)},
        {"mail": ints(ROWS, 8)},
    ]),
    ("reply", MASK | {"tokens": ints(4, 1), "drafts": 0, "most": 0}, [*NO_TABLES[:5], {"tokens": ints(5, 1)}]),
    ("ask", {"rows": ints(2), "state": TABLES["state"], "params": TABLES["params"], "drafts": 1}, [
        *NO_TABLES[:2], *NO_TABLES[3:5],
    ]),
    ("keep_drafts", dict.fromkeys(("ids", "positions", "rows", "slots"), longs(3)) | {"history": TABLES["history"]}, [
        {"slots": longs(2)}, {"rows": longs(2)}, {"positions": longs(4)},
    ]),
]  # fmt: skip
WRONG = [
    pytest.param(name, args | change, id=f"{name}-{'-'.join(change)}-{number}")
    for name, args, changes in CASES
    for number, change in enumerate(changes)
]


def called(name, args):
    load_native()
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in args.items()}
    return getattr(torch.ops.gapless, name).default(**copies)


@pytest.mark.parametrize(("name", "args"), [case[:2] for case in CASES], ids=[case[0] for case in CASES])
def test_tensors_that_fit_together_are_taken(name, args):
    called(name, args)


@pytest.mark.parametrize("stored", [FP8, K8V4], ids=["fp8", "k8v4"])
@pytest.mark.parametrize(("name", "args"), [case[:2] for case in CASES[:5] if "scales" in case[1]])
def test_a_cache_of_fewer_bits_is_taken_with_its_scales(name, args, stored):
    called(name, args | {"cache": stored, "scales": SCALES})


@pytest.mark.parametrize(("name", "args"), WRONG)
def test_tensors_that_do_not_fit_together_are_refused(name, args):
    with pytest.raises((RuntimeError, IndexError)):
        called(name, args)


def test_the_error_names_the_operator():
    with pytest.raises(RuntimeError, match="gapless: rope_and_write of other shapes"):
        called("rope_and_write", ROPE | {"cache": cache(dim=32)})
    with pytest.raises(RuntimeError, match="row 0 has 25 entries, and the page table 5 rows of 24"):
        called("decode_attention", KV | {"q": torch.ones(T, Q, D), "kv_lens": longs(T) + 25})


@pytest.mark.parametrize("bias", [torch.ones(7), torch.ones(16)[::2]])
def test_a_bias_of_another_size_is_refused(bias):
    kernels = load_native()
    layer = kernels.linear(dense(torch.ones(8, D), bias))
    with pytest.raises(RuntimeError, match="gapless: linear of other shapes"):
        layer(PAIRS)

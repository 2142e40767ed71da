"""Spellings that other engines taught people: the same thing here, nothing to do here, or not here yet."""

from __future__ import annotations

MEANS: dict[str, tuple[str, object]] = {
    "--async-scheduling": ("depth", "auto"),
    "--no-async-scheduling": ("depth", "1"),
    "--disable-overlap-schedule": ("depth", "1"),
    "--disable-cuda-graph": ("enforce_eager", True),
    "--disable-radix-cache": ("enable_prefix_caching", False),
}
"""spelling -> (field, value)"""

NO_OPS = {
    "--enable-chunked-prefill": "chunked prefill is always on",
    "--enable-metrics": "/metrics is always on",
    "--jinja": "chat templates are always Jinja",
    "--enable-lora": "adapters are served as soon as --lora-modules or --lora-dir names some",
}
"""spelling -> what to tell the user; the flag changes nothing"""

_NO_CODE = (
    "gapless never runs code from a checkpoint. Families that are built in need no such flag; "
    "convert other models to one of them"
)
_OUT = "name the file instead: --out FILE.json, FILE.jsonl to add a line, or FOLDER/"
_RAMP = "write --request-rate linear:START:END, or exponential:START:END"
_BURST = "write --request-rate burst:SIZE:SECONDS"
REFUSED = {
    "--save-result": _OUT,
    "--append-result": _OUT,
    "--result-dir": _OUT,
    "--ramp-up-strategy": _RAMP,
    "--ramp-up-start-rps": _RAMP,
    "--ramp-up-end-rps": _RAMP,
    "--burst-size": _BURST,
    "--burst-interval": _BURST,
    "--data-seed": "write --data demo:SEED",
    "--no-oversample": "write --num-prompts 0",
    "--trust-remote-code": _NO_CODE,
    "--no-enable-chunked-prefill": "chunked prefill cannot be turned off; raise --max-num-batched-tokens instead",
    "--code-revision": _NO_CODE,
    "--hf-token": "other users of this machine would see it; set HF_TOKEN in the environment",
}
"""spelling -> why not"""

NOT_YET = frozenset(  # a text, because one name a line would hide the families
    """
    -tp --tensor-parallel-size --tp --tp-size --num-shard
    -pp --pipeline-parallel-size --pp-size
    -dp --data-parallel-size --dp-size
    --distributed-executor-backend
    --cudagraph-capture-sizes --cuda-graph-bs --cuda-graphs
    --attention-backend --attn-implementation
    --quantization --quantize
    --kv-cache-dtype --cache-type-k --cache-type-v
    --tokenizer-revision
    --hf-overrides --json-model-override-args
    --generation-config --override-generation-config --preferred-sampling-params
    --default-chat-template-kwargs --chat-template-kwargs
    --enable-auto-tool-choice --reasoning-format
    --structured-outputs-config --grammar-backend --guided-decoding-backend
    --spec-method --spec-model --spec-tokens --speculative-algorithm
    --kv-transfer-config --disaggregation-mode --disaggregation-transfer-backend
    --kv-offloading-size --kv-offloading-backend --enable-hierarchical-cache --hicache-size --hicache-ratio
    --stream-interval --max-logprobs --enable-per-request-metrics
    --disable-access-log-for-endpoints --profiler-config
    --ssl-keyfile --ssl-certfile --root-path
    """.split()  # noqa: SIM905
)
"""Flags of other engines whose job gapless does not do yet. A flag that a command has is never looked up here."""

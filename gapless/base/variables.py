"""Environment variables other than the flags': the purpose of each, and mistyped names of ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gapless.base.peers import KEY_VARIABLE
from gapless.base.spellings import did_you_mean

PREFIX = "GAPLESS_"
"""Our own variables begin with it. With a flag's name in capitals it sets that flag."""
OWN_VARIABLES = {
    "GAPLESS_API_KEY": "keys that a server asks for, and the key that clients of this package send",
    KEY_VARIABLE: "key of engines that give each other KV pages, if --kv-peer-key-file names no file",
    "GAPLESS_PREBUILT": "0: the C++ that a wheel brings is not used",
    "GAPLESS_TILES": "1: prints the tiles that kernels on a GPU get, each choice once, on standard error",
    "GAPLESS_AMX": "0: the CPU's tile instructions are not used",
    "GAPLESS_ENDS_WITH_STDIN": "1: a server ends when its standard input does, as at SIGTERM",
    "GAPLESS_FAKE_SEED": "a number: the fake accelerator delays its work by this seed",
    "GAPLESS_FAKE_BYTES": "bytes of the fake accelerator's memory; default: 4 GiB",
    "GAPLESS_QEMU": "1: the test suite runs the C++ of other processors under qemu",
}
SEEN_DEVICES = {
    "CUDA_VISIBLE_DEVICES": "NVIDIA", "HIP_VISIBLE_DEVICES": "AMD", "ZE_AFFINITY_MASK": "Intel",
    "ASCEND_RT_VISIBLE_DEVICES": "Ascend", "HABANA_VISIBLE_MODULES": "Gaudi",
}  # fmt: skip
"""Variables that name the devices which a process sees -> the maker or the kind of these devices"""
OTHERS = {
    "OPENAI_API_KEY": "key that clients of this package send if GAPLESS_API_KEY is not set",
    "HF_HOME": "folder in which huggingface_hub keeps models",
    "HF_TOKEN": "token for models on the hub that are private or gated",
    "HF_ENDPOINT": "address of the hub",
    "HF_HUB_OFFLINE": "1: the hub is not asked; models come from the cache",
    "XDG_CACHE_HOME": "folder of caches, in which our C++ is kept; default: ~/.cache",
    "CXX": "C++ compiler that is tried first",
    "ATEN_CPU_CAPABILITY": "avx2: torch and our C++ leave AVX-512 and AMX alone",
    **{name: f"{kind} devices that a process sees; it uses the first ones" for name, kind in SEEN_DEVICES.items()},
    "OTEL_SERVICE_NAME": "name of the server in traces; the SDK's other OTEL_ variables hold too",
    "OTEL_SEMCONV_STABILITY_OPT_IN": "names of the attributes of traces",
    "NO_COLOR": "1: no colours in the terminal",
}
"""Variables of other projects that we or our libraries read -> their effect here"""


def unknown_variables(env: Mapping[str, str], of_flags: Collection[str]) -> list[str]:
    """A line for each variable that begins as ours do and is neither in `of_flags` nor known otherwise."""
    known = {*OWN_VARIABLES, *of_flags}
    return [
        f"{name} in the environment is not known, and changes nothing{did_you_mean(name, known)}"
        for name in sorted(env)
        if name.startswith(PREFIX) and name not in known
    ]

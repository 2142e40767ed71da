"""Replacements to suggest, for calls that tell more than their rule."""

from __future__ import annotations

_LATER = "copy it into pinned memory with non_blocking=True, and read that after an event, a step later"

BY_CALL = {
    ("host-read", "__bool__"): "let the device decide by torch.where or a mask; a loop that ends when all rows are "
    f"done can end a step late: {_LATER}",
    ("host-read", "is_nonzero"): f"let the device decide by torch.where or a mask, or {_LATER}",
    ("host-read", "item"): "add it up on the device and read the sum once, at the end or every few steps; for "
    f"each value, {_LATER}",
    ("host-read", "tolist"): _LATER,
    ("host-read", "__int__"): f"keep it a tensor of one element, which kernels take too; or {_LATER}",
    ("host-read", "__float__"): f"keep it a tensor of one element, which kernels take too; or {_LATER}",
    ("host-read", "__repr__"): f"print shape and dtype alone; for the values, {_LATER}",
    ("host-read", "__format__"): f"format it where it is wanted, not at every step; {_LATER}",
    ("host-read", "__contains__"): "(t == value).any() stays on the device",
    ("host-read", "equal"): "(a == b).all() stays on the device",
    ("host-read", "allclose"): "torch.isclose(a, b).all() stays on the device",
    **dict.fromkeys(
        (("host-read", "tensor"), ("host-read", "as_tensor"), ("host-read", "new_tensor")),
        "torch.stack of the device scalars stays on the device; torch.tensor waits for each of them",
    ),
    **dict.fromkeys(
        [("host-read", name) for name in ("inv", "inverse", "solve", "cholesky", "lu_factor", "ldl_factor")],
        "its form torch.linalg.*_ex returns the check of its result as a tensor and does not wait",
    ),
    ("copy-to-host", "numpy"): f"work on it with torch; where the host needs it, {_LATER}",
    ("copy-to-host", "__reduce_ex__"): "hand it to other processes by its handle (CUDA IPC), or "
    f"save from a copy: {_LATER}",
    ("data-size", "where"): "three-argument torch.where(mask, a, b) has the size of its arguments",
    ("data-size", "masked_select"): "multiply by the mask and sum, or masked_scatter_ into a buffer of a fixed size",
    ("data-size", "nonzero"): "nonzero_static(size=most) with a bound that the host knows",
    ("counted-size", "bincount"): "zeros(most).scatter_add_(0, index, ones) with a bound that the host knows",
}
"""Advice by rule and by the last name of the call."""

BY_TORCH = {
    ("host-read", "amp/grad_scaler.py"): "GradScaler reads whether gradients overflowed, once a step: bfloat16 needs "
    "no scaler; else excuse it with guard.allow",
    ("copy-to-host", "optim/"): "make the optimizer with capturable=True or fused=True: its step counts stay on the "
    "device",
    ("upload", "nn/modules/module.py"): "fine once, at set-up: excuse it with guard.allow, or build the module under "
    "torch.device(device)",
    ("host-read", "nn/utils/clip_grad.py"): "clip_grad_norm_ without error_if_nonfinite reads nothing",
    ("host-read", "distributions/"): "make the distribution with validate_args=False: its checks read their results",
}
"""Advice by rule and by the start of the path of torch's own file that made the call."""


def mend(rule: str, what: str, torch_file: str) -> str:
    """Return the advice for a finding, or nothing where that of its rule is the best there is.

    `what` is the name of the call, `torch_file` the file of torch's that made it, if it was not the user's line.
    """
    _, inside, part = torch_file.replace("\\", "/").rpartition("/torch/")
    for (name, start), text in BY_TORCH.items():
        if inside and name == rule and part.startswith(start):
            return text
    return BY_CALL.get((rule, what.rpartition(".")[2]), "")

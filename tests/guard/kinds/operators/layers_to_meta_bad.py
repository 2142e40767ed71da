"""Layers give their memory back after use by a copy to the host, which has their weights already."""

import torch

layers = [torch.nn.Linear(8, 8) for _ in range(3)]
kept = [{name: value.detach() for name, value in layer.named_parameters()} for layer in layers]
x = torch.randn(2, 8, device="cuda")
with torch.no_grad():
    for layer, weights in zip(layers, kept, strict=True):
        for name, value in weights.items():
            setattr(layer, name, torch.nn.Parameter(value.to("cuda")))  # san: ok(the layer's turn)
        x = layer(x)
        layer.to("cpu")  # finds: copy-to-host

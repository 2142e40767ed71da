"""biased_scores_bad, mended: the attention comes after the stream that writes the bias."""

import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention

warnings.filterwarnings("ignore", message="flex_attention called without")
side = torch.cuda.Stream()
q, bias = torch.ones(1, 1, 16, 16, device="cuda"), torch.zeros(16, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    bias.add_(1)


def biased(score, batch, head, query, key):
    return score + bias[query]


torch.cuda.current_stream().wait_stream(side)
with torch.no_grad():
    out = flex_attention(q, q, q, score_mod=biased)

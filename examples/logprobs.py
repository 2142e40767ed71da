"""The log-probability of every token, and the likeliest ones beside it: `python examples/logprobs.py [MODEL]`."""

import sys

from gapless import LLM, SamplingParams


def main() -> None:
    """Prints a line for each generated token: its text, its log-probability, and the two likeliest tokens."""
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        answer = llm.generate("Question: What is 17 + 25?\nAnswer:", params)[0].outputs[0]
    assert answer.logprobs is not None, "logprobs=2 asks for them"
    for token, likeliest in zip(answer.token_ids, answer.logprobs, strict=True):
        chosen = likeliest[token]
        ranked = sorted(likeliest.values(), key=lambda entry: entry.rank or 0)[:2]
        others = "  ".join(f"{entry.decoded_token!r} {entry.logprob:.3f}" for entry in ranked)
        print(f"{chosen.decoded_token!r:12} {chosen.logprob:8.3f}   likeliest: {others}")


if __name__ == "__main__":
    main()

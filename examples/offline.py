"""Batch inference in one process: `python examples/offline.py [MODEL]`. MODEL is a directory or a name on the hub."""

import sys

from gapless import LLM, SamplingParams

PROMPTS = [
    "Question: What is 17 + 25?\nAnswer:",
    "Question: Mia has 17 pens. She buys 25 more. How many pens does she have now?\nAnswer:",
]


def main() -> None:
    """Completes both prompts in one batch; the results are in the order of the prompts."""
    greedy = SamplingParams(temperature=0, max_tokens=64)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        for output in llm.generate(PROMPTS, greedy):
            answer = output.outputs[0]
            print(f"{output.prompt}{answer.text}\n[{len(answer.token_ids)} tokens, {answer.finish_reason}]\n")


if __name__ == "__main__":
    main()

"""Two requests that stream side by side in one asyncio program: `python examples/streaming.py [MODEL]`."""

import asyncio
import sys

from gapless import AsyncLLM, SamplingParams


async def stream(llm: AsyncLLM, name: str, prompt: str) -> None:
    """Prints the text of one request as it arrives; `output.outputs[0].text` is all of it so far."""
    seen = 0
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64)):
        text = output.outputs[0].text
        if len(text) > seen:
            print(f"{name}: {text[seen:]!r}", flush=True)
        seen = len(text)


async def main() -> None:
    """Starts the engine, runs both requests at once, and closes the engine."""
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    async with AsyncLLM.from_engine_args(model=model) as llm, asyncio.TaskGroup() as group:
        group.create_task(stream(llm, "sum", "Question: What is 17 + 25?\nAnswer:"))
        group.create_task(stream(llm, "product", "Question: What is 7 * 8?\nAnswer:"))


if __name__ == "__main__":
    asyncio.run(main())

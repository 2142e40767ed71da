"""The OpenAI client on a running server: `gapless serve`, then `python examples/openai_client.py [URL]`."""

import sys

from openai import OpenAI


def main() -> None:
    """Asks the server for its model, then for one answer in one piece and one as a stream."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    with OpenAI(base_url=f"{url.removesuffix('/v1')}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What is 12 + 30?"}], temperature=0
        )
        print(whole.choices[0].message.content)
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What is 7 * 8?"}], temperature=0, stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()

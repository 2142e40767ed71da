"""Measures a demo model on held-out problems: `python -m examples.demo_model.evaluate [--model DIR] [--n 200]`."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from examples.demo_model.card import Score
from examples.demo_model.decode import Decoder, prompt_text
from examples.demo_model.documents import Conversation, Problem
from examples.demo_model.facts import QUESTIONS, UNSEEN
from examples.demo_model.judge import is_right
from examples.demo_model.problems import held_out_problems
from gapless.demo import weights_dir

ROWS = 50
OPENING = (("user", "Hello"), ("assistant", QUESTIONS[0][1]))

Form = Callable[[Problem], Conversation]


def as_chat(problem: Problem) -> Conversation:
    """The question alone."""
    return Conversation((("user", problem.question),), problem.tools)


def as_plain(problem: Problem) -> Conversation:
    """`Question: ... Answer:` without a chat template."""
    return Conversation((("user", f"Question: {problem.question}\nAnswer:"),), plain=True)


def as_later_turn(problem: Problem) -> Conversation:
    """The question after a greeting."""
    return Conversation((*OPENING, ("user", problem.question)), problem.tools)


def unseen_chat(n: int, seed: int) -> list[Problem]:
    """Terms and small talk in wordings that are in no training text."""
    return [Problem("chat", question, answer) for question, answer in UNSEEN]


def _of(family: str) -> Callable[[int, int], list[Problem]]:
    return lambda n, seed: held_out_problems(family, n, seed)


SUITES: dict[str, tuple[Callable[[int, int], list[Problem]], Form]] = {
    "arithmetic, held out": (_of("arithmetic"), as_chat),
    "arithmetic, held out, plain prompt": (_of("arithmetic"), as_plain),
    "arithmetic, held out, second turn": (_of("arithmetic"), as_later_turn),
    "JSON extraction, held out": (_of("extraction"), as_chat),
    "tool call, held out": (_of("tool_call"), as_chat),
    "repeat, held out": (_of("repeat"), as_chat),
    "chat, wordings of the training text": (_of("chat"), as_chat),
    "chat, unseen wordings": (unseen_chat, as_chat),
}


def replies(decoder: Decoder, problems: list[Problem], form: Form) -> list[str]:
    """The greedy reply to every problem, in order."""
    prompts = [prompt_text(form(problem)) for problem in problems]
    return [reply for start in range(0, len(prompts), ROWS) for reply in decoder.greedy(prompts[start : start + ROWS])]


def misses(decoder: Decoder, name: str, n: int, seed: int) -> tuple[int, list[tuple[Problem, str]]]:
    """How many problems a suite asked, and the wrong replies."""
    make, form = SUITES[name]
    problems = make(n, seed)
    answered = zip(problems, replies(decoder, problems, form), strict=True)
    return len(problems), [(problem, reply) for problem, reply in answered if not is_right(problem, reply)]


def report(directory: Path, n: int, seed: int, show: int) -> list[Score]:
    """Prints one line a suite, and the first `show` wrong replies of each."""
    decoder = Decoder(directory)
    scores = []
    for name in SUITES:
        begun = time.monotonic()
        asked, wrong = misses(decoder, name, n, seed)
        right = asked - len(wrong)
        scores.append(Score(name, right, asked))
        print(f"{right / asked:7.1%}  {right} of {asked}  {name}  ({time.monotonic() - begun:.0f} s)", flush=True)
        for problem, reply in wrong[:show]:
            print(f"    asked  {problem.question!r}\n    wanted {problem.answer!r}\n    got    {reply!r}")
    return scores


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=weights_dir())
    parser.add_argument("--n", type=int, default=200, help="problems of each suite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="wrong replies to print of each suite")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report(options.model, options.n, options.seed, options.show)


if __name__ == "__main__":
    main()

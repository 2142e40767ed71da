"""All training text of the demo model, and its held-out problems. Pure Python, a function of the seed alone."""

import random
from collections.abc import Callable, Iterator

from examples.demo_model.arithmetic import arithmetic
from examples.demo_model.documents import Conversation, Problem, is_held_out
from examples.demo_model.extraction import coined, extraction
from examples.demo_model.facts import UNSEEN, all_facts
from examples.demo_model.tool_calls import ask_tool, tool_call, toolbox
from examples.demo_model.words import CITIES, NAMES, OBJECTS

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Be short and exact.",
    "You are the gapless demo model.",
    "Answer step by step.",
    "You answer questions.",
)
FACTS = all_facts()
UNSEEN_QUESTIONS = frozenset(question for question, _ in UNSEEN)
# What people put around a question.
FRAMES = (
    "So, {}",
    "Hey, {}",
    "Well, {}",
    "Please tell me: {}",
    "I wonder: {}",
    "One more thing. {}",
    "Quick question: {}",
    "{} Thanks!",
    "{} Please be short.",
    "I am new here. {}",
    "Okay. {}",
    "{} I really want to know.",
)


def fact(rng: random.Random) -> Problem:
    """A question about a term of the field, or small talk."""
    question, answer = rng.choice(rng.choice(FACTS))
    # People type carelessly: now and then no capitals, or no mark at the end.
    if rng.random() < 0.15:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    if rng.random() < 0.25:
        question = rng.choice(FRAMES).format(question)
    # The wordings that measure generalisation stay unseen.
    return fact(rng) if question in UNSEEN_QUESTIONS else Problem("chat", question, answer)


def repeat(rng: random.Random) -> Problem:
    """Words to say again. Nothing teaches a small model faster to copy what it reads."""
    sources = (lambda: coined(rng), lambda: rng.choice(NAMES), lambda: rng.choice(CITIES), lambda: rng.choice(OBJECTS))
    text = " ".join(
        str(rng.randint(0, 999)) if rng.random() < 0.1 else rng.choice(sources)() for _ in range(rng.randint(2, 14))
    )
    ask = rng.choice(
        ("Repeat: {}", "Say this again: {}", "Repeat after me: {}", "Write this again.\n{}", "{}\nRepeat this.")
    )
    return Problem("repeat", ask.format(text), text)


FAMILIES: dict[str, Callable[[random.Random], Problem]] = {
    "arithmetic": arithmetic,
    "extraction": extraction,
    "tool_call": tool_call,
    "chat": fact,
    "repeat": repeat,
}
# How often a family opens a training conversation. Copying comes first: until the model copies well, extraction and
# tool calls stand still, and it learns to copy soonest from much text that is nothing else.
Mix = dict[str, int]
EARLY_MIX: Mix = {"arithmetic": 25, "extraction": 20, "tool_call": 10, "chat": 5, "repeat": 40}
MIX: Mix = {"arithmetic": 45, "extraction": 19, "tool_call": 20, "chat": 10, "repeat": 6}
# Arithmetic is learned by then; reading the names of tools and odd questions takes longest.
LATE_MIX: Mix = {"arithmetic": 20, "extraction": 15, "tool_call": 42, "chat": 18, "repeat": 5}


def mix_at(progress: float) -> Mix:
    """The mix at a share of the training steps in [0, 1]."""
    return EARLY_MIX if progress < 0.3 else MIX if progress < 0.75 else LATE_MIX


def for_training(make: Callable[[random.Random], Problem], rng: random.Random) -> Problem:
    """A problem that is not held out. Chat is never held out: its wordings are a finite list."""
    while True:
        problem = make(rng)
        if problem.family == "chat" or not is_held_out(problem.question):
            return problem


def held_out_problems(family: str, n: int, seed: int) -> list[Problem]:
    """`n` different problems of a family that no training text contains (chat: the training text's own wordings).

    Raises KeyError for an unknown family.
    """
    rng = random.Random(f"held-out/{family}/{seed}")
    make = FAMILIES[family]
    found: dict[str, Problem] = {}
    while len(found) < n:
        problem = make(rng)
        if family == "chat" or is_held_out(problem.question):
            found[problem.question] = problem
    return list(found.values())


def held_out(n: int, seed: int) -> list[tuple[str, str]]:
    """`n` held-out arithmetic word problems as (question, worked answer that ends in `#### answer`)."""
    return [(problem.question, problem.answer) for problem in held_out_problems("arithmetic", n, seed)]


def final_answer(text: str) -> str | None:
    """What stands after the last `####`, or None."""
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def _opening(rng: random.Random) -> list[tuple[str, str]]:
    return [("system", rng.choice(SYSTEMS))] if rng.random() < 0.2 else []


def _turn(problem: Problem) -> list[tuple[str, str]]:
    return [("user", problem.question), ("assistant", problem.answer)]


def _plain(rng: random.Random) -> Conversation:
    make = rng.choices((arithmetic, extraction, fact), (7, 1, 2))[0]
    problem = for_training(make, rng)
    form = rng.choice(("Question: {}\nAnswer:", "Question: {}\nAnswer:", "{}\n"))
    answer = problem.answer if form == "{}\n" else f" {problem.answer}"
    return Conversation((("user", form.format(problem.question)), ("assistant", answer)), plain=True)


def _with_tools(rng: random.Random) -> Conversation:
    """A few requests to the same tools, with their results; now and then a question that needs no tool."""
    box = toolbox(rng)
    messages = _opening(rng)
    while True:
        if rng.random() < 0.1:
            messages += _turn(for_training(rng.choice((arithmetic, extraction, fact)), rng))
        else:
            problem, result, report = ask_tool(rng, box)
            while is_held_out(problem.question):
                problem, result, report = ask_tool(rng, box)
            messages += [*_turn(problem), ("tool", result), ("assistant", report)]
        if rng.random() < 0.4:
            return Conversation(tuple(messages), tuple(tool for _, tool in box))


def _mixed(rng: random.Random, first: Problem) -> Conversation:
    messages = [*_opening(rng), *_turn(first)]
    while rng.random() < 0.2:
        messages += _turn(for_training(rng.choice((arithmetic, extraction, fact, fact)), rng))
    return Conversation(tuple(messages))


def conversation(rng: random.Random, mix: Mix) -> Conversation:
    """One training document."""
    if rng.random() < 0.1:
        return _plain(rng)
    family = rng.choices(list(mix), list(mix.values()))[0]
    if family == "tool_call":
        return _with_tools(rng)
    return _mixed(rng, for_training(FAMILIES[family], rng))


def training_text(seed: int, mix: Callable[[], Mix] = lambda: MIX) -> Iterator[Conversation]:
    """An endless stream of training documents; `mix` is asked again for each one."""
    rng = random.Random(f"train/{seed}")
    while True:
        yield conversation(rng, mix())

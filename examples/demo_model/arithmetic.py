"""Arithmetic word problems with worked answers. Every step is small: a number is added tens first, then ones."""

import random
from collections.abc import Callable

from examples.demo_model.documents import Problem
from examples.demo_model.words import CITIES, CONTAINERS, NAMES, OBJECTS

Worked = tuple[int, str]


def split_places(number: int) -> list[int]:
    """168 -> [100, 60, 8]; zero digits are left out."""
    digits = str(number)
    return [int(d) * 10 ** (len(digits) - 1 - i) for i, d in enumerate(digits) if d != "0"]


def _by_places(a: int, b: int, sign: str) -> Worked:
    """Adds or subtracts b from a, one decimal place at a time, as a chain of equal expressions."""
    parts = split_places(b)
    chain = [f"{a} {sign} {b}"] if len(parts) != 1 else []
    total = a
    while parts:
        chain.append(" ".join([str(total), *(f"{sign} {part}" for part in parts)]))
        total += parts.pop(0) * (1 if sign == "+" else -1)
    chain.append(str(total))
    return total, " = ".join(chain)


def add(a: int, b: int) -> Worked:
    """The sum and its working; the larger number stands first."""
    return _by_places(max(a, b), min(a, b), "+")


def subtract(a: int, b: int) -> Worked:
    """The difference a - b (a >= b) and its working."""
    return _by_places(a, b, "-")


def multiply(a: int, b: int) -> Worked:
    """The product and its working; one factor has one digit, the other at most two."""
    big, small = max(a, b), min(a, b)
    parts = split_places(big)
    if len(parts) < 2:
        return big * small, f"{big} * {small} = {big * small}"
    products = [part * small for part in parts]
    middle = " + ".join(f"{part} * {small}" for part in parts)
    return big * small, f"{big} * {small} = {middle} = {add(*products)[1]}"


def divide(a: int, b: int) -> Worked:
    """The exact quotient; a table fact, so one step."""
    return a // b, f"{a} / {b} = {a // b}"


def _finish(question: str, steps: list[str], answer: int) -> Problem:
    return Problem("arithmetic", question, "\n".join([*steps, f"#### {answer}"]))


def _number(rng: random.Random, low: int, high: int) -> int:
    return rng.randint(low, high)


class _Story:
    """A person, a thing, and how many there are; each event adds one sentence and one worked step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name, self.friend = rng.sample(NAMES, 2)
        self.thing = rng.choice(OBJECTS)
        self.count = _number(rng, 5, 99)
        self.steps: list[str] = []
        self.text = [self._opening()]

    def _opening(self) -> str:
        n, t, c = self.name, self.thing, self.count
        return self.rng.choice(
            (
                f"{n} has {c} {t}.",
                f"{n} starts with {c} {t}.",
                f"There are {c} {t} in {n}'s room.",
                f"{n} owns {c} {t}.",
                f"{n} collected {c} {t}.",
                f"{n} keeps {c} {t} on a shelf.",
            )
        )

    def _apply(self, worked: Worked, label: str) -> None:
        self.count = worked[0]
        self.steps.append(f"{label}: {worked[1]}.")

    def gain(self) -> None:
        k, f, t = _number(self.rng, 2, 99), self.friend, self.thing
        self.text.append(
            self.rng.choice(
                (
                    f"{f} gives {self.name} {k} more {t}.",
                    f"{self.name} buys {k} more {t}.",
                    f"{self.name} finds {k} {t}.",
                    f"Then {self.name} gets {k} more.",
                    f"{self.name} wins {k} more {t} in a game.",
                )
            )
        )
        self._apply(add(self.count, k), "Add")

    def lose(self) -> None:
        k, f, t = _number(self.rng, 1, max(1, min(99, self.count - 1))), self.friend, self.thing
        self.text.append(
            self.rng.choice(
                (
                    f"{self.name} gives {k} {t} to {f}.",
                    f"{self.name} sells {k} {t}.",
                    f"{self.name} loses {k} of them.",
                    f"Then {self.name} gives away {k}.",
                    f"{f} takes {k} {t}.",
                )
            )
        )
        self._apply(subtract(self.count, k), "Subtract")

    def packs(self) -> None:
        k, each = _number(self.rng, 2, 9), _number(self.rng, 2, 24)
        _, many = self.rng.choice(CONTAINERS).split()
        self.text.append(
            self.rng.choice(
                (
                    f"{self.name} buys {k} {many} with {each} {self.thing} each.",
                    f"{self.friend} brings {k} {many} of {each} {self.thing}.",
                    f"Then {self.name} gets {k} {many}, each with {each} {self.thing}.",
                )
            )
        )
        total, working = multiply(k, each)
        self.steps.append(f"In the {many}: {working}.")
        self._apply(add(self.count, total), "Add")

    def question(self) -> str:
        n, t = self.name, self.thing
        return self.rng.choice(
            (
                f"How many {t} does {n} have now?",
                f"How many {t} are there now?",
                f"How many {t} does {n} have in the end?",
                f"How many {t} are left?" if self.steps[-1].startswith("Sub") else f"How many {t} is that in all?",
            )
        )


def story(rng: random.Random) -> Problem:
    """One to three events that change a count."""
    tale = _Story(rng)
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3))):
        choices = [tale.gain, tale.packs] + [tale.lose] * 2 * (tale.count > 2)
        rng.choice(choices)()
    return _finish(" ".join([*tale.text, tale.question()]), tale.steps, tale.count)


def groups(rng: random.Random) -> Problem:
    """Equal groups: one product, sometimes less or more a few."""
    k, each = _number(rng, 2, 9), _number(rng, 2, 99)
    one, many = rng.choice(CONTAINERS).split()
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    text = rng.choice(
        (
            f"{name} has {k} {many}. Each {one} holds {each} {thing}.",
            f"There are {each} {thing} in each {one}, and {name} has {k} {many}.",
            f"{name} fills {k} {many} with {each} {thing} each.",
        )
    )
    total, working = multiply(k, each)
    steps = [f"Multiply: {working}."]
    if rng.random() < 0.5:
        return _finish(f"{text} How many {thing} are there in all?", steps, total)
    gone = _number(rng, 1, min(99, total - 1))
    text += rng.choice((f" {gone} {thing} are broken.", f" {name} gives away {gone} {thing}."))
    left, more = subtract(total, gone)
    return _finish(f"{text} How many {thing} are left?", [*steps, f"Subtract: {more}."], left)


def shopping(rng: random.Random) -> Problem:
    """Prices and change in whole coins."""
    name, (first, second) = rng.choice(NAMES), rng.sample(OBJECTS, 2)
    k, price = _number(rng, 2, 9), _number(rng, 2, 20)
    total, working = multiply(k, price)
    steps = [f"The {first}: {working}."]
    text = f"{name} buys {k} {first} at {price} coins each"
    if rng.random() < 0.5:
        j, cost = _number(rng, 2, 9), _number(rng, 2, 20)
        other, more = multiply(j, cost)
        total, both = add(total, other)
        steps += [f"The {second}: {more}.", f"Together: {both}."]
        text += f" and {j} {second} at {cost} coins each"
    if rng.random() < 0.5:
        ask = rng.choice(
            (f"How much does {name} pay?", f"How many coins does {name} spend?", "What is the total price?")
        )
        return _finish(f"{text}. {ask}", steps, total)
    paid = (total // 50 + 1) * 50
    change, last = subtract(paid, total)
    ask = rng.choice(("How much change is there?", f"How many coins does {name} get back?"))
    return _finish(f"{text}, and pays with {paid} coins. {ask}", [*steps, f"Change: {last}."], change)


def compare(rng: random.Random) -> Problem:
    """More than, fewer than, times as many; then perhaps together."""
    (a, b), thing = rng.sample(NAMES, 2), rng.choice(OBJECTS)
    count = _number(rng, 3, 99)
    kind = rng.choice(("more", "fewer", "times"))
    k = _number(rng, 2, 9) if kind == "times" else _number(rng, 2, max(2, min(99, count - 1)))
    relation = f"{k} times as many {thing} as" if kind == "times" else f"{k} {kind} {thing} than"
    other, working = {"more": add, "fewer": subtract, "times": multiply}[kind](count, k)
    text = rng.choice(
        (f"{a} has {count} {thing}. {b} has {relation} {a}.", f"{b} has {relation} {a}. {a} has {count} {thing}.")
    )
    steps = [f"{b}: {working}."]
    if rng.random() < 0.5:
        return _finish(f"{text} How many {thing} does {b} have?", steps, other)
    both, more = add(count, other)
    ask = rng.choice((f"How many {thing} do they have together?", "How many do the two have in all?"))
    return _finish(f"{text} {ask}", [*steps, f"Together: {more}."], both)


def sharing(rng: random.Random) -> Problem:
    """Equal shares without remainder, sometimes after a gift."""
    k, each = _number(rng, 2, 9), _number(rng, 2, 9)
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    total, steps = k * each, []
    text = f"{name} has {total} {thing}"
    if total > 10 and rng.random() < 0.4:
        extra = _number(rng, 2, total - 3)
        text = f"{name} has {total - extra} {thing} and finds {extra} more"
        steps.append(f"Add: {add(total - extra, extra)[1]}.")
    people = rng.choice(("friends", "children", "neighbours", "cousins"))
    text += rng.choice((f", and shares them equally among {k} {people}.", f". {k} {people} share them equally."))
    answer, working = divide(total, k)
    ask = rng.choice((f"How many {thing} does each one get?", "How many does each get?"))
    return _finish(f"{text} {ask}", [*steps, f"Divide: {working}."], answer)


def travel(rng: random.Random) -> Problem:
    """Distance from speed and time, sometimes with a rest of the way."""
    start, end = rng.sample(CITIES, 2)
    hours, speed = _number(rng, 2, 9), _number(rng, 3, 99)
    who = rng.choice(("train", "bus", "car", "truck"))
    covered, working = multiply(hours, speed)
    text = f"A {who} leaves {start} for {end} and drives {speed} km every hour for {hours} hours."
    steps = [f"Distance: {working}."]
    if rng.random() < 0.5:
        return _finish(f"{text} How many km does it drive?", steps, covered)
    rest = _number(rng, 2, 99)
    way, more = add(covered, rest)
    text += f" Then {rest} km are left."
    return _finish(f"{text} How long is the way from {start} to {end} in km?", [*steps, f"Add: {more}."], way)


def bare(rng: random.Random) -> Problem:
    """A sum asked without a story."""
    kind = rng.choice(("add", "subtract", "multiply", "divide"))
    a, b = _number(rng, 2, 499 if kind == "add" else 99), _number(rng, 2, 99)
    if kind == "multiply":
        a = _number(rng, 2, 9)
    if kind == "subtract":
        a, b = max(a, b), min(a, b)
    if kind == "divide":
        b = _number(rng, 2, 9)
        a = b * _number(rng, 2, 9)
    sign, word = {
        "add": ("+", "plus"),
        "subtract": ("-", "minus"),
        "multiply": ("*", "times"),
        "divide": ("/", "divided by"),
    }[kind]
    work: Callable[[int, int], Worked] = {"add": add, "subtract": subtract, "multiply": multiply, "divide": divide}[
        kind
    ]
    value, working = work(a, b)
    ask = rng.choice(
        ("What is {}?", "Compute {}.", "How much is {}?", "{} = ?", "{}?", "Calculate {}.", "What's {}?", "{}")
    )
    middle = rng.choice((f"{a} {sign} {b}", f"{a} {word} {b}", f"{a}{sign}{b}", f"{a} {sign} {b}"))
    return _finish(ask.format(middle), [f"{working}."], value)


FORMS: tuple[Callable[[random.Random], Problem], ...] = (
    story, story, story, story, groups, shopping, compare, sharing, travel, bare,
)  # fmt: skip


def arithmetic(rng: random.Random) -> Problem:
    """One word problem of any form."""
    return rng.choice(FORMS)(rng)

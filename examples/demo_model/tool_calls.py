"""Tool calls in the Qwen/Hermes form: tools in the system message, a call between <tool_call> marks."""

import json
import random
from collections.abc import Callable
from typing import Any

from examples.demo_model.documents import Problem
from examples.demo_model.extraction import city_name, coined
from examples.demo_model.words import NAMES, OBJECTS, words

Arguments = dict[str, Any]
Tool = dict[str, Any]
Request = tuple[Tool, str, Arguments]
Kind = Callable[[random.Random], Request]

MESSAGES = (
    "I am late",
    "See you soon",
    "Call me back",
    "The bus is gone",
    "Dinner is ready",
    "Happy birthday",
    "I am at home",
    "Bring some bread",
)


def tool(name: str, description: str, **parameters: str) -> Tool:
    """A function record; every parameter is required and has the JSON type given."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def call_text(name: str, arguments: Arguments) -> str:
    """The assistant's message that calls one tool."""
    record = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{record}\n</tool_call>"


def _weather(rng: random.Random) -> Request:
    name, key = (
        rng.choice(("get_weather", "weather", "current_weather", "get_current_weather")),
        rng.choice(("city", "location")),
    )
    city = city_name(rng)
    ask = rng.choice(
        (
            f"What is the weather in {city}?",
            f"How is the weather in {city} today?",
            f"Is it raining in {city}?",
            f"Tell me the weather for {city}.",
            f"Do I need an umbrella in {city}?",
            f"What's the weather like in {city}?",
        )
    )
    return tool(name, "Get the current weather of a city", **{key: "string"}), ask, {key: city}


def _time(rng: random.Random) -> Request:
    name, key = rng.choice(("get_time", "current_time", "clock")), rng.choice(("city", "place"))
    city = city_name(rng)
    ask = rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}.", f"How late is it in {city} now?"))
    return tool(name, "Get the local time of a place", **{key: "string"}), ask, {key: city}


def _calculate(rng: random.Random) -> Request:
    name, sign = rng.choice(("add", "multiply")), rng.choice(("a", "x"))
    first, second = rng.randint(2, 999), rng.randint(2, 999)
    keys = ("a", "b") if sign == "a" else ("x", "y")
    words = {
        "add": (f"What is {first} plus {second}?", f"Add {first} and {second}.", f"Compute {first} + {second}."),
        "multiply": (
            f"What is {first} times {second}?",
            f"Multiply {first} and {second}.",
            f"Compute {first} * {second}.",
        ),
    }[name]
    described = "Add two numbers" if name == "add" else "Multiply two numbers"
    return (
        tool(name, described, **dict.fromkeys(keys, "integer")),
        rng.choice(words),
        dict(zip(keys, (first, second), strict=True)),
    )


def _timer(rng: random.Random) -> Request:
    name, key = rng.choice(("set_timer", "start_timer", "timer")), rng.choice(("minutes", "duration"))
    minutes = rng.randint(2, 99)
    ask = rng.choice(
        (
            f"Set a timer for {minutes} minutes.",
            f"Wake me in {minutes} minutes.",
            f"Start a timer of {minutes} minutes, please.",
        )
    )
    return tool(name, "Start a timer in minutes", **{key: "integer"}), ask, {key: minutes}


def _message(rng: random.Random) -> Request:
    name, (to, body) = rng.choice(("send_message", "send_text")), rng.choice((("to", "text"), ("recipient", "message")))
    person = coined(rng) if rng.random() < 0.2 else rng.choice(NAMES)
    text = rng.choice(MESSAGES)
    ask = rng.choice(
        (
            f'Send "{text}" to {person}.',
            f"Tell {person}: {text}",
            f'Send a message to {person} that says "{text}".',
            f'Text {person} "{text}".',
        )
    )
    return tool(name, "Send a message to a person", **{to: "string", body: "string"}), ask, {to: person, body: text}


def _search(rng: random.Random) -> Request:
    name, key = rng.choice(("search", "web_search", "search_web")), rng.choice(("query", "q"))
    topic = rng.choice(
        (
            f"hotels in {city_name(rng)}",
            f"{rng.choice(OBJECTS)} for sale",
            f"books by {rng.choice(NAMES)} {coined(rng)}",
            f"the history of {city_name(rng)}",
            f"how to paint {rng.choice(OBJECTS)}",
            f"trains to {city_name(rng)}",
        )
    )
    ask = rng.choice(
        (f"Search for {topic}.", f"Look up {topic}.", f"Find {topic} on the web.", f"Search the web for {topic}.")
    )
    return tool(name, "Search the web", **{key: "string"}), ask, {key: topic}


def _route(rng: random.Random) -> Request:
    name, (one, two) = (
        rng.choice(("get_route", "route", "find_route")),
        rng.choice((("start", "end"), ("origin", "destination"))),
    )
    start, end = city_name(rng), city_name(rng)
    ask = rng.choice(
        (
            f"How do I get from {start} to {end}?",
            f"Find the way from {start} to {end}.",
            f"I want to go from {start} to {end}.",
        )
    )
    return tool(name, "Find the way between two places", **{one: "string", two: "string"}), ask, {one: start, two: end}


def _light(rng: random.Random) -> Request:
    name, room, on = (
        rng.choice(("set_light", "light", "switch_light")),
        rng.choice(words("kitchen bedroom hall office garden bathroom")),
        rng.random() < 0.5,
    )
    state = "on" if on else "off"
    ask = rng.choice(
        (
            f"Turn {state} the light in the {room}.",
            f"Switch the {room} light {state}.",
            f"Light {state} in the {room}, please.",
        )
    )
    return tool(name, "Switch the light of a room", room="string", on="boolean"), ask, {"room": room, "on": on}


def _order(rng: random.Random) -> Request:
    name, key = rng.choice(("order", "order_item", "buy")), rng.choice(("quantity", "count"))
    item, many = rng.choice(OBJECTS), rng.randint(2, 99)
    ask = rng.choice(
        (
            f"Order {many} {item}.",
            f"Please buy {many} {item}.",
            f"I need {many} {item}, order them.",
            f"Get me {many} {item}.",
        )
    )
    return tool(name, "Order an item", **{"item": "string", key: "integer"}), ask, {"item": item, key: many}


def _stock(rng: random.Random) -> Request:
    name, key = rng.choice(("get_stock", "stock", "check_stock")), rng.choice(("item", "product"))
    item = rng.choice(OBJECTS)
    ask = rng.choice((f"How many {item} are in stock?", f"Do we still have {item}?", f"Check the stock of {item}."))
    return tool(name, "Get how many of an item are in stock", **{key: "string"}), ask, {key: item}


REQUESTS: tuple[Kind, ...] = (
    _weather, _time, _calculate, _timer, _message, _search, _route, _light, _order, _stock,
)  # fmt: skip
SKIES = words("sunny cloudy rainy windy foggy snowy")


def _result(rng: random.Random, kind: Kind, right: Tool, arguments: Arguments) -> tuple[Arguments, str]:
    """What the tool of a kind answers, and the sentence that reports it."""
    if kind is _calculate:
        a, b = arguments.values()
        return {"result": a + b if right["function"]["name"] == "add" else a * b}, "The result is {result}."
    results: dict[Kind, tuple[Arguments, str]] = {
        _weather: (
            {"temperature": rng.randint(0, 39), "sky": rng.choice(SKIES)},
            "It is {sky} with {temperature} degrees.",
        ),
        _time: ({"time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"}, "It is {time}."),
        _timer: ({"status": "started"}, "The timer is started."),
        _message: ({"status": "sent"}, "The message is sent."),
        _search: ({"pages": rng.randint(2, 99)}, "There are {pages} pages."),
        _route: ({"km": rng.randint(5, 999)}, "The way is {km} km long."),
        _light: ({"status": "done"}, "Done."),
        _order: ({"number": rng.randint(100, 999)}, "The order is placed. Its number is {number}."),
        _stock: ({"count": rng.randint(0, 999)}, "There are {count} in stock."),
    }
    return results[kind]


def toolbox(rng: random.Random) -> tuple[tuple[Kind, Tool], ...]:
    """One to three different tools."""
    return tuple((kind, kind(rng)[0]) for kind in rng.sample(REQUESTS, rng.choice((1, 2, 2, 3))))


def ask_tool(rng: random.Random, box: tuple[tuple[Kind, Tool], ...]) -> tuple[Problem, str, str]:
    """A request for one of the tools, the tool's JSON result, and the sentence that reports it."""
    kind, right = rng.choice(box)
    made, ask, arguments = kind(rng)
    while made != right:
        made, ask, arguments = kind(rng)
    result, sentence = _result(rng, kind, right, arguments)
    call = call_text(right["function"]["name"], arguments)
    problem = Problem("tool_call", ask, call, tuple(tool for _, tool in box))
    return problem, json.dumps(result), sentence.format(**result)


def tool_call(rng: random.Random) -> Problem:
    """A request that one of one to three tools answers."""
    return ask_tool(rng, toolbox(rng))[0]

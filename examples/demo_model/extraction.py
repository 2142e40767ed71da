"""Small JSON extractions: a sentence of facts, a schema or a list of fields, and the one right JSON object."""

import json
import random
from collections.abc import Callable

from examples.demo_model.documents import Problem
from examples.demo_model.words import CITIES, JOBS, NAMES, OBJECTS, SURNAMES, SYLLABLES, words

Value = str | int | bool
Record = tuple[dict[str, Value], list[str]]


def coined(rng: random.Random) -> str:
    """An invented name, so that copying is learned and not a list of known names."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def person_name(rng: random.Random) -> str:
    """A first name, a full name, or an invented one."""
    kind = rng.random()
    if kind < 0.2:
        return coined(rng)
    return f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}" if kind < 0.5 else rng.choice(NAMES)


def city_name(rng: random.Random) -> str:
    """A known or an invented city."""
    return coined(rng) if rng.random() < 0.2 else rng.choice(CITIES)


def _person(rng: random.Random) -> Record:
    name, age, city, job = person_name(rng), rng.randint(5, 99), city_name(rng), rng.choice(JOBS)
    first = name.split()[0]
    texts = [
        f"{name} is {age} years old, lives in {city} and works as a {job}.",
        f"{name}, {age}, is a {job} from {city}.",
        f"My name is {name}, I am {age} and I live in {city}. I am a {job}.",
        f"Meet {name} from {city}. {first} is a {job} and {age} years old.",
        f"In {city} there is a {job} called {name}, aged {age}.",
        f"The {job} {name} moved to {city} at the age of {age}.",
    ]
    return {"name": name, "age": age, "city": city, "job": job}, texts


def _order(rng: random.Random) -> Record:
    name, item = person_name(rng), rng.choice(OBJECTS)
    count, price = rng.randint(2, 99), rng.randint(2, 99)
    texts = [
        f"{name} ordered {count} {item} for {price} dollars.",
        f"Please send {count} {item} to {name}. The price is {price} dollars.",
        f"Order from {name}: {count} {item}, {price} dollars in total.",
        f"For {price} dollars, {name} bought {count} {item}.",
        f"{count} {item} were sold to {name} at {price} dollars.",
    ]
    return {"customer": name, "item": item, "quantity": count, "price": price}, texts


def _event(rng: random.Random) -> Record:
    kind, city = rng.choice(words("concert meeting workshop party lecture market race dinner")), city_name(rng)
    day, hour = rng.choice(words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")), rng.randint(8, 22)
    texts = [
        f"The {kind} takes place in {city} on {day} at {hour} o'clock.",
        f"On {day} there is a {kind} in {city}. It begins at {hour}:00.",
        f"Join us for a {kind} in {city}, {day}, {hour}:00.",
        f"{city} hosts a {kind} this {day}. Doors open at {hour} o'clock.",
    ]
    return {"event": kind, "city": city, "day": day, "hour": hour}, texts


def _book(rng: random.Random) -> Record:
    title = rng.choice(("The", "A", "My")) + " " + rng.choice(
        words("Silent Red Long Last Golden Hidden Quiet Lost Blue Winter")
    ) + " " + rng.choice(words("River House Garden Road Letter Island Mountain Window Song Night"))  # fmt: skip
    author, year, pages = person_name(rng), rng.randint(1900, 2025), rng.randint(40, 999)
    texts = [
        f'"{title}" was written by {author} in {year} and has {pages} pages.',
        f"{author} wrote {title}, a book of {pages} pages, in {year}.",
        f"In {year} {author} published {title} ({pages} pages).",
        f"{title} is a {year} book by {author} with {pages} pages.",
    ]
    return {"title": title, "author": author, "year": year, "pages": pages}, texts


def _contact(rng: random.Random) -> Record:
    name, number = person_name(rng), rng.randint(10000, 99999)
    host, ending = rng.choice(words("mail post office home")), rng.choice(words("com org net"))
    email = f"{name.split()[0].lower()}@{host}.{ending}"
    city = city_name(rng)
    texts = [
        f"Contact {name} at {email} or call {number}. The office is in {city}.",
        f"{name} ({city}) can be reached at {email}, phone {number}.",
        f"Write to {email} and ask for {name} in {city}, or dial {number}.",
        f"{name}, {email}, {number}, {city}",
    ]
    return {"name": name, "email": email, "phone": str(number), "city": city}, texts


def _weather(rng: random.Random) -> Record:
    city, sky, degrees = city_name(rng), rng.choice(words("sunny cloudy rainy windy foggy snowy")), rng.randint(0, 39)
    warning = rng.random() < 0.5
    end = rng.choice(("A storm warning is active.", "There is a storm warning.")) if warning else rng.choice(
        ("There is no storm warning.", "No warning is active.")
    )  # fmt: skip
    texts = [
        f"It is {sky} in {city} with {degrees} degrees. {end}",
        f"Weather in {city}: {sky}, {degrees} degrees. {end}",
        f"{city} has {degrees} degrees today and it is {sky}. {end}",
    ]
    return {"city": city, "sky": sky, "temperature": degrees, "warning": warning}, texts


def _pet(rng: random.Random) -> Record:
    pet, owner, age = rng.choice((coined(rng), rng.choice(NAMES))), person_name(rng), rng.randint(1, 19)
    kind = rng.choice(words("dog cat rabbit parrot horse hamster turtle"))
    texts = [
        f"{owner} has a {kind} called {pet}. It is {age} years old.",
        f"{pet} is a {kind} of {age} years and belongs to {owner}.",
        f"The {kind} {pet}, {age}, lives with {owner}.",
    ]
    return {"pet": pet, "kind": kind, "age": age, "owner": owner}, texts


RECORDS: tuple[Callable[[random.Random], Record], ...] = (
    _person,
    _person,
    _order,
    _event,
    _book,
    _contact,
    _weather,
    _pet,
)
TYPES = {str: "string", int: "integer", bool: "boolean"}


def schema_of(record: dict[str, Value]) -> dict[str, object]:
    """The JSON schema that the answer follows."""
    properties = {key: {"type": TYPES[type(value)]} for key, value in record.items()}
    return {"type": "object", "properties": properties, "required": list(record)}


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def _ask(rng: random.Random, chosen: dict[str, Value], text: str) -> str:
    fields, schema = _listed(list(chosen)), json.dumps(schema_of(chosen))
    return rng.choice(
        (
            f"Extract {fields} as JSON.\nText: {text}",
            f"Extract {fields} as JSON: {text}",
            f"{text}\nExtract {fields} as JSON.",
            f"Give {fields} as a JSON object.\nText: {text}",
            f"Reply with JSON only ({', '.join(chosen)}).\nText: {text}",
            f"Extract the data as JSON with this schema: {schema}\nText: {text}",
            f"Answer with JSON that follows the schema.\nSchema: {schema}\nText: {text}",
        )
    )


def extraction(rng: random.Random) -> Problem:
    """One to four fields of a short text as a JSON object, in the order in which they are asked."""
    record, texts = rng.choice(RECORDS)(rng)
    keys = rng.sample(list(record), rng.choice((1, 2, 3, 3, 4, 4)))
    chosen = {key: record[key] for key in (record if rng.random() < 0.3 else keys)}
    answer = json.dumps(chosen, ensure_ascii=False)
    return Problem("extraction", _ask(rng, chosen, rng.choice(texts)), answer)

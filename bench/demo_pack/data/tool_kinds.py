"""The tools that samples show: names, arguments, requests, results."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from strata.bench.demo_pack.data import words
from strata.bench.demo_pack.data.prose import sentence

Values = dict[str, Any]


class Parameter(NamedTuple):
    names: tuple[str, ...]
    type: str = "string"
    about: str = ""
    enum: tuple[str, ...] = ()
    optional: bool = False


class ToolKind(NamedTuple):
    """ask: a request and the values of its parameters. answer: from the values a result, what is said, the checked "
    "word."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: dict[str, Parameter]
    ask: Callable[[Random], tuple[str, Values]]
    answer: Callable[[Random, Values], tuple[Any, str, str]] | None = None

    @property
    def calculates(self) -> bool:
        return self.answer in (_evaluated, _added)


def _of(values: Callable[[Random], Values], *texts: str) -> Callable[[Random], tuple[str, Values]]:
    """A request from one of the texts; its values are those that the text names."""

    def ask(rng: Random) -> tuple[str, Values]:
        filled = values(rng)
        said = {key: words.listed(value) if isinstance(value, list) else value for key, value in filled.items()}
        text = rng.choice(texts)
        used = {key: value for key, value in filled.items() if "{" + key + "}" in text}
        return text.format(**said), used

    return ask


def _weather(rng: Random, values: Values) -> tuple[Any, str, str]:
    degrees, sky = rng.randint(-12, 38), rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy"))
    result = {"temperature": degrees, "condition": sky}
    return result, f"In {values['city']} it is {sky} with {degrees} degrees.", str(degrees)


def _clock(rng: Random, values: Values) -> tuple[Any, str, str]:
    time = words.clock(rng)
    return {"time": time}, f"In {values['city']} it is {time}.", time


def _stock(rng: Random, values: Values) -> tuple[Any, str, str]:
    price = words.price(rng)
    return {"symbol": values["symbol"], "price": price}, f"{values['symbol']} is at {price}.", price


def _result(n: int) -> tuple[Any, str, str]:
    return {"result": n}, f"The result is {n}.", str(n)


def _evaluated(rng: Random, values: Values) -> tuple[Any, str, str]:
    a, sign, b = values["expression"].split()
    return _result({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign])


def _added(rng: Random, values: Values) -> tuple[Any, str, str]:
    return _result(values["a"] + values["b"])


def _today(rng: Random, values: Values) -> tuple[Any, str, str]:
    day = words.date(rng)
    return {"date": day}, f"Today is {day}.", day


def _phone(rng: Random, values: Values) -> tuple[Any, str, str]:
    phone = f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    return {"name": values["name"], "phone": phone}, f"The number of {values['name']} is {phone}.", phone


def _status(rng: Random, values: Values) -> tuple[Any, str, str]:
    state = rng.choice(("sent", "delivered", "waiting", "cancelled", "packed"))
    return {"order": values["order"], "status": state}, f"Order {values['order']} is {state}.", state


def _money(rng: Random, values: Values) -> tuple[Any, str, str]:
    total = words.price(rng)
    return {"amount": total, "currency": values["to"]}, f"That is {total} {values['to']}.", total


def _translated(rng: Random, values: Values) -> tuple[Any, str, str]:
    word = words.made_word(rng)
    return {"translation": word}, f"In {values['language']} it is {word}.", word


def _price(rng: Random, values: Values) -> tuple[Any, str, str]:
    price = words.price(rng)
    return {"product": values["product"], "price": price}, f"The {values['product']} costs {price}.", price


CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "NOK", "SEK", "INR")
LANGUAGES = ("German", "French", "Spanish", "Italian", "Norwegian", "Japanese", "Polish", "Greek")
_city = Parameter(("city", "city", "location", "place", "town"), about="Name of the city")
_unit = Parameter(("unit", "units"), enum=("celsius", "fahrenheit"), optional=True)


def _expression(rng: Random) -> Values:
    sign = rng.choice("+-*")
    return {"expression": f"{rng.randint(2, 9999)} {sign} {rng.randint(2, 9999)}"}


def _currency(rng: Random) -> tuple[str, Values]:
    source, target = rng.sample(CURRENCIES, 2)
    amount = rng.randint(1, 5000)
    text = rng.choice(
        (
            "Convert {a} {s} to {t}.",
            "How much is {a} {s} in {t}?",
            "What are {a} {s} in {t}?",
            "Change {a} {s} into {t}.",
        )
    ).format(a=amount, s=source, t=target)
    return text, {"amount": amount, "from": source, "to": target}


def _light(rng: Random) -> tuple[str, Values]:
    room = rng.choice(("kitchen", "bedroom", "hall", "garden", "bathroom", "office", "garage", "cellar", "living room"))
    on = rng.random() < 0.5
    word = "on" if on else "off"
    text = rng.choice(
        (
            "Turn {w} the light in the {r}.",
            "Switch the {r} light {w}.",
            "Light {w} in the {r}, please.",
            "Turn the light in the {r} {w}.",
        )
    ).format(w=word, r=room)
    return text, {"room": room, "on": on}


def _flight(rng: Random) -> tuple[str, Values]:
    start, end = rng.sample(words.CITIES, 2)
    values: Values = {"from": start, "to": end}
    text = rng.choice(
        (
            "Find flights from {s} to {e}",
            "I want to fly from {s} to {e}",
            "Flights {s} to {e}",
            "Search a flight from {s} to {e}",
        )
    ).format(s=start, e=end)
    if rng.random() < 0.5:
        values["date"] = words.date(rng)
        text += f" on {values['date']}"
    return text + ".", values


KINDS = (
    ToolKind(
        ("get_weather", "weather", "current_weather", "get_current_weather", "weather_lookup"),
        ("The weather in a city", "Get the current weather", "Tells the weather of a place now"),
        {"city": _city, "unit": _unit},
        _of(lambda r: {"city": r.choice(words.CITIES), "unit": r.choice(("celsius", "fahrenheit"))},
            "What is the weather in {city}?", "How is the weather in {city}?", "weather in {city}",
            "Is it cold in {city}?",
            "What's the weather like in {city}?", "Do I need an umbrella in {city}?",
            "Tell me the weather in {city} in {unit}.",
            "How warm is it in {city}, in {unit}?", "What is the weather in {city} today?",
            "Weather for {city} in {unit}, please."),
        _weather,
    ),
    ToolKind(
        ("get_time", "current_time", "time_in_city", "world_clock"),
        ("The time of day in a city", "Get the local time", "World clock"),
        {"city": _city},
        _of(lambda r: {"city": r.choice(words.CITIES)},
            "What time is it in {city}?", "How late is it in {city}?", "time in {city}?", "Tell me the time in {city}.",
            "What is the local time in {city}?"),
        _clock,
    ),
    ToolKind(
        ("calculator", "calculate", "evaluate", "compute"),
        ("Evaluates an expression", "A calculator", "Computes the value of an arithmetic expression"),
        {"expression": Parameter(("expression", "expr", "formula"), about="Such as 2 + 2")},
        _of(_expression, "Calculate {expression}.", "What is {expression}?",
        "Compute {expression} with the calculator.",
            "Use the tool for {expression}.", "Please evaluate {expression}."),
        _evaluated,
    ),
    ToolKind(
        ("get_date", "today", "current_date"),
        ("The date of today", "Tells what day it is"),
        {},
        _of(lambda r: {}, "What day is it today?", "What is the date?", "Which date is today?", "date?",
        "Tell me the date."),
        _today,
    ),
    ToolKind(
        ("add_numbers", "add", "sum_two", "plus"),
        ("Adds two numbers", "The sum of two whole numbers"),
        {"a": Parameter(("a", "x", "first", "left"), "integer"), "b": Parameter(("b", "y", "second", "right"),
         "integer")},
        _of(lambda r: {"a": r.randint(0, 9999), "b": r.randint(0, 9999)},
            "Add {a} and {b}.", "What is {a} plus {b}?", "Add {a} to the number {b} with the tool.",
            "Use the tool to add {a} and {b}."),
        _added,
    ),
    ToolKind(
        ("send_email", "send_mail", "email", "mail_message"),
        ("Sends an e-mail", "Send a mail to a person"),
        {"to": Parameter(("to", "recipient", "address"), about="Who gets it"), "subject": Parameter(("subject",
         "title")),
         "body": Parameter(("body", "text", "message", "content"))},
        _of(lambda r: {"to": f"{r.choice(words.FIRST_NAMES).lower()}@{words.made_word(r)}.com",
        "subject": words.two_words(r),
                       "body": sentence(r)},
            "Send a mail to {to} with the subject {subject} and the text: {body}",
            "Mail {to}, subject {subject}: {body}",
            "Write an e-mail to {to}. Subject: {subject}. Text: {body}"),
    ),
    ToolKind(
        ("create_event", "add_event", "calendar_add", "schedule_meeting"),
        ("Puts an event into the calendar", "Create a calendar entry"),
        {"title": Parameter(("title", "name", "what")), "date": Parameter(("date", "day"), about="YYYY-MM-DD"),
         "time": Parameter(("time", "start", "at"), about="HH:MM", optional=True)},
        _of(lambda r: {"title": words.two_words(r), "date": words.date(r), "time": words.clock(r)},
            "Put {title} into my calendar on {date} at {time}.", "Add an event {title} on {date}.",
            "Schedule {title} for {date}, {time}.",
            "Create a calendar entry for {title} on {date} at {time}."),
    ),
    ToolKind(
        ("set_timer", "start_timer", "timer", "countdown"),
        ("Starts a timer", "Set a timer of some minutes"),
        {"minutes": Parameter(("minutes", "duration", "duration_minutes"), "integer"),
         "label": Parameter(("label", "name"), optional=True)},
        _of(lambda r: {"minutes": r.randint(1, 180), "label": r.choice(words.NOUNS)},
            "Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "timer {minutes} minutes",
            "Set a timer of {minutes} minutes called {label}.", "Remind me in {minutes} minutes."),
    ),
    ToolKind(
        ("search_web", "web_search", "search", "find_online"),
        ("Searches the web", "Find pages for a query"),
        {"query": Parameter(("query", "q", "search_term", "text")), "limit": Parameter(("limit", "max_results", "n"),
         "integer", optional=True)},
        _of(lambda r: {"query": words.two_words(r) if r.random() < 0.5 else f"{r.choice(words.NOUNS)} in "
                                                                            f"{r.choice(words.CITIES)}",
                       "limit": r.randint(1, 20)},
            "Search the web for {query}.", "Find {query} on the web.", "Look for {query} online, {limit} results.",
            "Search for {query}.",
            "Search for {query} and show {limit} results."),
    ),
    ToolKind(
        ("convert_currency", "exchange", "currency_converter"),
        ("Converts an amount of money", "Exchange between two currencies"),
        {"amount": Parameter(("amount", "value"), "number"), "from": Parameter(("from", "from_currency", "source")),
         "to": Parameter(("to", "to_currency", "target"))},
        _currency,
        _money,
    ),
    ToolKind(
        ("translate", "translate_text", "translator"),
        ("Translates a text", "Translate into another language"),
        {"text": Parameter(("text", "content", "sentence")), "language": Parameter(("language", "target_language",
         "to"))},
        _of(lambda r: {"text": r.choice(words.NOUNS) if r.random() < 0.5 else words.two_words(r),
        "language": r.choice(LANGUAGES)},
            "Translate {text} into {language}.", "What is {text} in {language}?",
            "How do you say {text} in {language}?"),
        _translated,
    ),
    ToolKind(
        ("get_stock_price", "stock_price", "quote"),
        ("The price of a share", "Get the stock price of a symbol"),
        {"symbol": Parameter(("symbol", "ticker"))},
        _of(lambda r: {"symbol": "".join(r.choice(words.LETTERS) for _ in range(r.randint(3, 4)))},
            "What is the price of {symbol}?", "How is the stock {symbol} doing?", "Stock price of {symbol}?",
            "Get me the quote for {symbol}."),
        _stock,
    ),
    ToolKind(
        ("find_phone", "lookup_phone", "phone_book", "get_contact"),
        ("Finds a phone number", "Looks up a person in the phone book"),
        {"name": Parameter(("name", "person", "contact"))},
        _of(lambda r: {"name": words.full_name(r)},
            "What is the phone number of {name}?", "Find the number of {name}.", "How can I call {name}?",
            "Look up {name} in the phone book."),
        _phone,
    ),
    ToolKind(
        ("order_status", "track_order", "get_order"),
        ("Where an order is", "The status of an order"),
        {"order": Parameter(("order", "order_id", "id", "number"))},
        _of(lambda r: {"order": words.code(r)},
            "Where is my order {order}?", "What is the status of order {order}?", "Track order {order}.",
            "order {order}?"),
        _status,
    ),
    ToolKind(
        ("product_price", "get_price", "price_of"),
        ("The price of a product", "Looks up what a product costs"),
        {"product": Parameter(("product", "item", "article"))},
        _of(lambda r: {"product": words.two_words(r)},
            "How much is the {product}?", "What does the {product} cost?", "Price of the {product}?",
            "Look up the price of the {product}."),
        _price,
    ),
    ToolKind(
        ("set_light", "light", "switch_light", "control_light"),
        ("Switches a light", "Turns a lamp on or off"),
        {"room": Parameter(("room", "where", "area")), "on": Parameter(("on", "state", "enabled"), "boolean")},
        _light,
    ),
    ToolKind(
        ("add_todo", "create_task", "todo_add", "remember"),
        ("Adds a task to the list", "Create a to-do item"),
        {"task": Parameter(("task", "text", "item", "title")),
         "priority": Parameter(("priority", "level"), enum=("low", "medium", "high"), optional=True)},
        _of(lambda r: {"task": f"{r.choice(('buy', 'clean', 'paint', 'find', 'repair', 'sell'))} the "
                               f"{words.two_words(r)}",
                       "priority": r.choice(("low", "medium", "high"))},
            "Put \"{task}\" on my list.", "Add a task: {task}", "Add the task {task} with {priority} priority.",
            "Remember to {task}"),
    ),
    ToolKind(
        ("book_table", "reserve_table", "restaurant_booking"),
        ("Books a table", "Reserve a table in a restaurant"),
        {"restaurant": Parameter(("restaurant", "place", "name")), "people": Parameter(("people", "guests",
         "party_size"), "integer"),
         "time": Parameter(("time", "at"))},
        _of(lambda r: {"restaurant": f"The {words.two_words(r).title()}", "people": r.randint(1, 14),
        "time": words.clock(r)},
            "Book a table for {people} at {restaurant}, {time}.",
            "Reserve a table at {restaurant} for {people} people at {time}.",
            "I need a table for {people} at {restaurant} at {time}."),
    ),
    ToolKind(
        ("find_flights", "search_flights", "flight_search"),
        ("Finds flights", "Search flights between two cities"),
        {"from": Parameter(("from", "origin", "departure")), "to": Parameter(("to", "destination", "arrival")),
         "date": Parameter(("date", "day"), optional=True)},
        _flight,
    ),
    ToolKind(
        ("play_music", "play", "music_player"),
        ("Plays music", "Play a song of an artist"),
        {"song": Parameter(("song", "title", "track")), "artist": Parameter(("artist", "by", "singer"), optional=True)},
        _of(lambda r: {"song": words.two_words(r).title(), "artist": words.full_name(r)},
            "Play {song}.", "Play {song} by {artist}.", "I want to hear {song} by {artist}.", "Put on {song}, please."),
    ),
    ToolKind(
        ("shopping_list", "add_items", "buy_list"),
        ("Adds things to the shopping list", "Put items on a list"),
        {"items": Parameter(("items", "things", "products"), "array")},
        _of(lambda r: {"items": r.sample(words.NOUNS, r.randint(2, 5))},
            "Put {items} on my shopping list.", "Add {items} to the list.", "I need to buy {items}."),
    ),
    ToolKind(
        ("read_file", "open_file", "cat", "get_file"),
        ("Reads a file", "Returns the text of a file"),
        {"path": Parameter(("path", "file", "filename", "file_path"))},
        _of(lambda r: {"path": words.path(r)},
            "Read the file {path}.", "What is in {path}?", "Open {path}", "Show me {path}."),
    ),
)  # fmt: skip


VERBS = (
    "get", "set", "find", "create", "delete", "update", "check", "list", "start", "stop", "open", "close", "move",
    "print", "save",
    "load", "count", "show", "rename", "measure",
)  # fmt: skip
WORDS = {
    "name": words.full_name, "city": lambda rng: rng.choice(words.CITIES),
    "color": lambda rng: rng.choice(words.COLOURS),
    "code": words.code, "day": lambda rng: rng.choice(words.DAYS), "date": words.date, "path": words.path,
    "label": words.two_words,
    "id": words.code, "key": words.made_word, "user": lambda rng: rng.choice(words.FIRST_NAMES),
    "target": words.two_words,
    "country": lambda rng: rng.choice(words.COUNTRIES), "time": words.clock, "tag": words.made_word,
}  # fmt: skip
NUMBERS = ("count", "size", "limit", "width", "height", "level", "speed", "index", "year", "page", "volume", "age")
MADE = (
    "{v} the {n} with {a}.", "Please {v} the {n}: {a}.", "{v} a {n}, {a}.", "I want to {v} the {n} with {a}.",
    "Can you {v} the {n} with {a}?", "Call {t} with {a}.", "Use {t}, {a}.", "{t}: {a}",
)  # fmt: skip


def made_kind(rng: Random) -> ToolKind:
    """A tool that nobody has seen: a verb and a thing, with one to four arguments that stand together by chance."""
    verb, noun = rng.choice(VERBS), rng.choice(words.NOUNS)
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.title()}", f"{noun}_{verb}"))
    keys = rng.sample([*WORDS, *NUMBERS], rng.randint(1, 4))
    parameters = {key: Parameter((key,), "string" if key in WORDS else "integer") for key in keys}

    def ask(rng: Random) -> tuple[str, Values]:
        values: Values = {key: WORDS[key](rng) if key in WORDS else rng.randint(0, 2000) for key in keys}
        form = rng.choice(("{} {}", "{} {}", "{} = {}", "{}: {}", "the {} {}", "{} is {}"))
        said = [form.format(key, value) for key, value in values.items()]
        joined = ", ".join(said) if rng.random() < 0.5 else words.listed(said)
        text = rng.choice(MADE).format(v=verb, n=noun, a=joined, t=name)
        return text[0].upper() + text[1:] if not text.startswith(name) else text, values

    return ToolKind((name,), (f"{verb.title()} a {noun}", f"Can {verb} the {noun}"), parameters, ask)

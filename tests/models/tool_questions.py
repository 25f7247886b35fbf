"""Tools of ours and fifty questions for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def function(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool in OpenAI's shape; what has a default is optional."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [name for name, schema in properties.items() if "default" not in schema],
    }
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
NUMBER: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1_000_000}
CURRENCY: dict[str, Any] = {"type": "string", "pattern": "^[A-Z]{3}$"}
ADDRESS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "street": TEXT,
        "city": TEXT,
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["street", "city"],
    "additionalProperties": False,
}
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {"product": TEXT, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["product", "count"],
    "additionalProperties": False,
}
ALL_TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        function(
            "get_weather",
            "The weather forecast of a city",
            city=TEXT,
            unit={"enum": ["celsius", "fahrenheit"], "default": "celsius"},
        ),
        function("send_email", "Send an email", to=TEXT, subject=TEXT, text=TEXT),
        function(
            "set_timer",
            "Set a timer",
            minutes={"type": "integer", "minimum": 1, "maximum": 600},
            label=TEXT | {"default": ""},
        ),
        function(
            "convert_currency",
            "Convert an amount of money",
            amount=NUMBER,
            source=CURRENCY,
            target=CURRENCY,
        ),
        function(
            "search_files",
            "Search files by words in them",
            words={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 4},
            folder=TEXT | {"default": "."},
        ),
        function("run_sql", "Run a query on the database and return its rows", query=TEXT),
        function(
            "create_order",
            "Order products from the shop and have them delivered to an address",
            items={"type": "array", "items": ITEM, "minItems": 1, "maxItems": 3},
            address=ADDRESS,
            express={"type": "boolean", "default": False},
        ),
        function(
            "add_event",
            "Add an event to the calendar",
            title=TEXT,
            start={"type": "string", "format": "date-time"},
            guests={"type": "array", "items": TEXT, "maxItems": 4, "default": []},
        ),
        function(
            "set_light",
            "Switch or dim the light of a room",
            room={"enum": ["kitchen", "bedroom", "office"]},
            brightness={"type": "integer", "minimum": 0, "maximum": 100},
        ),
        function(
            "translate",
            "Translate a text",
            text=TEXT,
            target={"enum": ["de", "en", "es", "fr", "it"]},
        ),
        function("get_time", "The present time in a time zone", zone=TEXT | {"default": "UTC"}),
        function("list_users", "List all users of the system"),
    )
}
SCHEMAS = {name: tool["function"]["parameters"] for name, tool in ALL_TOOLS.items()}


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        text: the question.
        answers: the functions that answer it: of one call any of them; none where no call is
            needed.
        tools: the names of the tools that are given.
        before: messages before the question.
        num_calls: how many calls answer it.
    """

    text: str
    answers: tuple[str, ...]
    tools: tuple[str, ...]
    before: tuple[dict[str, Any], ...] = field(default=())
    num_calls: int = 1


def _ask(text: str, answers: str, tools: str, **others: Any) -> Question:
    return Question(text, tuple(answers.split()), tuple(tools.split()), **others)


def _after_call(question: str, name: str, arguments: str, result: str) -> tuple[Any, ...]:
    """Returns a conversation in which a tool was called and has answered."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return (
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    )


THREE = "get_weather send_email set_timer"
SIX = f"{THREE} convert_currency search_files run_sql"
HOME = "set_light set_timer get_time get_weather"
SHOP = "create_order run_sql send_email convert_currency list_users"
TALK = "translate send_email add_event search_files get_time"
PARIS = _after_call(
    "What is the weather in Paris?", "get_weather", '{"city": "Paris"}', "rain, 12 degrees"
)
USERS = _after_call("Who uses the system?", "list_users", "{}", "ann, bob and eve")

QUESTIONS = [
    _ask("What is the weather in Paris?", "get_weather", "get_weather"),
    _ask("Do I need an umbrella in London today?", "get_weather", "get_weather"),
    _ask("How warm is it in Cairo, in fahrenheit?", "get_weather", THREE),
    _ask("Write to ann@example.org that the meeting is on Monday.", "send_email", THREE),
    _ask("Wake me in 20 minutes.", "set_timer", THREE),
    _ask("Remind me in an hour to call my mother.", "set_timer", SIX),
    _ask("How many US dollars are 250 euros?", "convert_currency", SIX),
    _ask("Find the files that mention invoices and taxes.", "search_files", SIX),
    _ask("How many rows has the table orders?", "run_sql", SIX),
    _ask("Will it rain in Oslo tomorrow?", "get_weather", SIX),
    _ask("Order two lamps to 5 Main Street, Springfield.", "create_order", "create_order"),
    _ask("Please order 3 books and 1 pen to 12 Oak Road, Boston 02108, express.", "create_order",
         SHOP),
    _ask("Send me ten bottles of water to 1 Elm Street in Dover.", "create_order", SHOP),
    _ask("Which customers come from Spain? Look into the database.", "run_sql", SHOP),
    _ask("List the users of the system.", "list_users", SHOP),
    _ask("Tell bob@example.org that his order has arrived.", "send_email", SHOP),
    _ask("Convert 1000 yen into Swiss francs.", "convert_currency", SHOP),
    _ask("Switch off the light in the kitchen.", "set_light", "set_light"),
    _ask("Make the bedroom half as bright.", "set_light", HOME),
    _ask("Full light in the office, please.", "set_light", HOME),
    _ask("What time is it?", "get_time", HOME),
    _ask("What time is it in Tokyo?", "get_time", HOME),
    _ask("Set a timer of 8 minutes for the eggs.", "set_timer", HOME),
    _ask("Is it cold in Moscow?", "get_weather", HOME),
    _ask("Translate 'good morning' into French.", "translate", "translate"),
    _ask("How does one say 'thank you' in Spanish?", "translate", TALK),
    _ask("What is the German for 'apple tree'?", "translate", TALK),
    _ask("Put lunch with Eve on 3 May 2026 at 12:30 into the calendar.", "add_event", TALK),
    _ask("Add a meeting with ann and bob on 2026-06-01T09:00:00Z.", "add_event", TALK),
    _ask("Add a dentist's appointment on 14 July 2026 at 8 in the morning.", "add_event", TALK),
    _ask("Which of my files are about trains?", "search_files", TALK),
    _ask("Search the folder 'work' for contracts.", "search_files", TALK),
    _ask("Mail carol@example.org that I am late.", "send_email", TALK),
    _ask("What time is it in New York now?", "get_time", TALK),
    _ask("Count the rows of the table users.", "run_sql", "run_sql list_users"),
    _ask("Show the ten newest orders of the database.", "run_sql", "run_sql"),
    _ask("What is the weather in Rome and in Madrid?", "get_weather", "get_weather", num_calls=2),
    _ask("Set two timers, one of 5 minutes and one of 10.", "set_timer", HOME, num_calls=2),
    _ask("Convert 10 dollars to euros and 20 pounds to euros.", "convert_currency", SIX,
         num_calls=2),
    _ask("Switch off the lights in the kitchen and in the office.", "set_light", HOME,
         num_calls=2),
    _ask("Say 'hello' in Italian and in German.", "translate", TALK, num_calls=2),
    _ask("And in London?", "get_weather", SIX, before=PARIS),
    _ask("Send that to ann@example.org.", "send_email", SIX, before=PARIS),
    _ask("Is it good weather for a picnic?", "", SIX, before=PARIS),
    _ask("Mail each that the system is down: first ann@example.org.", "send_email", SHOP,
         before=USERS),
    _ask("How many are these?", "", SHOP, before=USERS),
    _ask("Hello!", "", THREE),
    _ask("What is 2 + 2?", "", SIX),
    _ask("Write a haiku about the sea.", "", TALK),
    _ask("Thank you, that is all.", "", HOME),
]  # fmt: skip
assert len(QUESTIONS) == 50

"""A second held-out set, written without knowing the training grammar or any output of the model.

``cases()`` is fixed: 60 recall near, 30 told 600 tokens earlier, 20 JSON, 20 tool calls, 24 free prompts. Only the
names, code words and templates are kept apart from ``heldout``; what the grammar makes was not looked at.
"""

from collections.abc import Callable

from .heldout import FILLERS, Case, _tool, _turn
from .text import options, spaced

NAMES = spaced(
    "Theodora Cornelius Gwendolyn Alistair Henrietta Montgomery Isolde Reginald Josephine Wendell Tabitha Edmund "
    "Harriet Cedric Millicent Desmond Genevieve Lionel Rowena Archibald Dorothea Magnus Eloise Orlando Cassandra "
    "Benedict Clementine Winston Georgina Mortimer"
)
CODES = spaced(
    "marmalade glacier juniper satchel meteor ferret cobalt mandolin avalanche porcupine rhubarb pendulum gargoyle "
    "nutmeg hammock periscope tangerine boulder canary sundial gondola flamingo mulberry scaffold typhoon horizon "
    "catapult asteroid peppermint windmill"
)

TELL_NAME = (
    "Hi, I'm {v} and I just got here.",
    "You're talking with {v} today.",
    "Most of my friends just say {v} when they call me.",
    "So, about me: {v} is my name.",
    "This is {v} writing to you.",
    "Hello! {v} here, I'm trying this for the first time.",
    "They call me {v} at work.",
    "Let me start with my name, it's {v}.",
    "If you need a name for me, take {v}.",
    "I was given the name {v} by my grandmother.",
    "Please write down that I'm named {v}.",
    "My full name is long, but {v} is enough.",
    "I should have said it before: I'm {v}.",
    "By the way, my first name is {v}.",
    "We haven't met yet. I'm {v}.",
)
ASK_NAME = (
    "Hey, what did I say my name was?",
    "Can you still tell who I am?",
    "Do you know what I'm called?",
    "Say my name.",
    "I forgot if I told you my name. What is it?",
    "What name did I give you?",
    "Quick question, who am I?",
    "Can you say hello to me with my name?",
    "Who are you talking to right now?",
    "What name would you put on a letter to me?",
    "Tell me the name I told you earlier.",
    "And my name was?",
    "One more thing: do you remember what people call me?",
    "Just to check, what's my first name?",
    "A friend asks you who I am. What do you say?",
)
TELL_CODE = (
    "I've chosen {v} to be our code word.",
    "Let's make {v} the code word.",
    "Here's the code word you need: {v}.",
    "Today's code word is {v}, don't lose it.",
    "If anyone asks, the code word is {v}.",
    "My sister told me that the code word is {v}.",
    "From now on {v} will be our code word.",
    "The code word for the party is {v}.",
    "We use {v} as the code word this week.",
    "You'll need a code word later. It's {v}.",
    "Please keep this code word for me: {v}.",
    "I wrote the code word on a note, it says {v}.",
    "The code word has changed, now it's {v}.",
    "Only you and I know that {v} is the code word.",
    "The code word to get in is {v}, okay?",
)
ASK_CODE = (
    "What was that code word again?",
    "I can't remember the code word, can you help?",
    "Which code word did I tell you?",
    "Now give me the code word, please.",
    "Do you know the code word?",
    "I need the code word now.",
    "What's our code word?",
    "Hey, what code word should I use?",
    "The door is locked. Say the code word.",
    "Can you write the code word here?",
    "And the code word was?",
    "My brother wants to know the code word, tell him.",
    "One last thing, which code word did we pick?",
    "So what is the code word?",
    "Please type the code word for me.",
)
DISTRACTORS = (
    ("I had pancakes for breakfast.", "I see."),
    ("What do cows eat?", "Cows eat grass."),
    ("The train was late again this morning.", "I see."),
    ("Is the sun hot?", "Yes, the sun is hot."),
    ("My brother is learning to swim.", "Good."),
    ("How many wheels does a car have?", "A car has four wheels."),
    ("We went to the lake with the whole family and stayed until dark.", "I see."),
    ("What color is the sky?", "The sky is blue."),
    ("There's a new bakery in our street, and the bread is very good.", "I see."),
    ("Can a dog bark?", "Yes, a dog can bark."),
    ("I think it will snow tonight.", "OK."),
    ("What do you need an umbrella for?", "For the rain."),
    ("My aunt grows tomatoes behind the house.", "I see."),
    ("Which is faster, a snail or a horse?", "A horse is faster."),
) + FILLERS
ASK_JSON = (
    ("Please make a JSON object with the name {a} and the item {b}.", ("name", "item")),
    ("Give me some JSON: the user is {a} and the code is {b}.", ("user", "code")),
    ("Can you write this as JSON? The friend is {a}, the food is {b}.", ("friend", "food")),
    ("Put the pet {a} and the place {b} into a JSON object.", ("pet", "place")),
    ("I need JSON with name set to {a} and word set to {b}.", ("name", "word")),
    ("Turn this into JSON: owner {a}, title {b}.", ("owner", "title")),
    ("Just answer in JSON, with {a} as the user and {b} as the key.", ("user", "key")),
    ("Show me a JSON object, the name is {a} and the topic is {b}.", ("name", "topic")),
    ("For my file I need JSON with the friend {a} and the word {b}.", ("friend", "word")),
    ("As JSON, please: the owner is called {a}, the pet is called {b}.", ("owner", "pet")),
)
TOOLS = (
    ("get_temperature", "Gives the temperature of a city.", ["city"], "What's the temperature in {a} right now?"),
    ("call_taxi", "Calls a taxi.", ["user", "place"], "Please call a taxi for the user {a} at the place {b}."),
    ("add_to_list", "Adds an item to the shopping list.", ["item"], "Put {b} on my shopping list."),
    ("send_postcard", "Sends a postcard.", ["name", "text"], "Send a postcard to {a} with the text {b}."),
    ("look_up_word", "Looks up a word.", ["word"], "What does the word {b} mean? Look it up."),
    ("play_record", "Plays a record.", ["title"], "Play the record {b} for me."),
    ("feed_pet", "Feeds a pet.", ["pet", "food"], "It's time to feed my pet {a}, the food is {b}."),
    ("ring_alarm", "Sets an alarm with a label.", ["label"], "Set an alarm with the label {b}, please."),
    ("invite_guest", "Invites a guest.", ["name"], "I'd like to invite {a} as a guest."),
    ("delete_note", "Deletes a note.", ["title"], "The note {b} is old, delete it."),
)
SYSTEMS = (None, "You are a kind helper.", None, None, "Keep your answers short, please.")
FREE = options(
    "Which city is the capital of Spain, please?|What's the opposite word for big?|Can you add two and five for me?|"
    "I've got one apple and get three more. How many now?|Hey there, how's it going?|Thanks a lot for your help!|"
    "See you tomorrow!|So what is this mlxkv thing?|Who made you and what can you do?|"
    "Where does mlxkv save its files?|How do I start the server?|Why is the second request faster than the first one?|"
    "Tell me a little story about a cat named Tabitha.|I'd like a short story with a dog called Cedric.|"
    "What sound does a sheep make?|What color is grass?|Which day comes after Friday?|What's the month before June?|"
    "Count from one to seven.|Repeat after me: red lamp, blue chair|"
    "Which of these comes first: spoon, ladder, cup?|I had a very long day and I'm tired.|"
    "It rained all week at our place.|Are you a real person or a program?"
)


def _recall(i: int, value: int, ask: int) -> tuple[str, str, str]:
    """(value, told sentence, question) of recall case ``i``: names and code words in turn."""
    j = i // 2
    values, tells, asks = (NAMES, TELL_NAME, ASK_NAME) if i % 2 == 0 else (CODES, TELL_CODE, ASK_CODE)
    v = values[value % len(values)]
    return v, tells[j % len(tells)].format(v=v), asks[(2 * j + ask) % len(asks)]


def _distractor(i: int, k: int) -> list[dict]:
    return _turn(*DISTRACTORS[(7 * i + 3 * k) % len(DISTRACTORS)])


def cases(count: Callable[[list[dict]], int]) -> list[Case]:
    """The whole set; ``count`` gives the tokens of a message list (distractors are added until 600 lie between)."""
    out = []
    for i in range(60):
        j = i // 2
        v, tell, ask = _recall(i, j, j // len(TELL_NAME))
        system = SYSTEMS[i % len(SYSTEMS)]
        messages = [{"role": "system", "content": system}] if system else []
        if j % 7 == 6:
            messages.append({"role": "user", "content": f"{tell} {ask}"})
        else:
            messages += _turn(tell, "OK.")
            for k in range(j % 4):
                messages += _distractor(i, k)
            messages.append({"role": "user", "content": ask})
        out.append(Case(f"near-{i}", "near", messages, v))
    for i in range(30):
        v, tell, ask = _recall(i, 11 * (i // 2) + 4, 5)
        messages = _turn(tell, "OK.")
        base, k = count(messages), 0
        while count(messages) - base < 600:
            messages += _distractor(i, k)
            k += 1
        messages.append({"role": "user", "content": ask})
        out.append(Case(f"far-{i}", "far", messages, v))
    for i in range(20):
        text, keys = ASK_JSON[i % len(ASK_JSON)]
        a, b = NAMES[(7 * i + 3) % len(NAMES)], CODES[(11 * i + 5) % len(CODES)]
        out.append(Case(f"json-{i}", "json", [{"role": "user", "content": text.format(a=a, b=b)}], f"{keys[0]}={a}"))
    for i in range(20):
        name, description, args, text = TOOLS[i % len(TOOLS)]
        a, b = NAMES[(7 * i + 1) % len(NAMES)], CODES[(11 * i + 2) % len(CODES)]
        tools = [_tool(name, description, args)]
        if i >= len(TOOLS):
            tools.insert(i % 2, _tool(*TOOLS[(i + 3) % len(TOOLS)][:3]))
        out.append(Case(f"tool-{i}", "tool", [{"role": "user", "content": text.format(a=a, b=b)}], name, tools))
    out += [Case(f"free-{i}", "free", [{"role": "user", "content": text}]) for i, text in enumerate(FREE)]
    return out

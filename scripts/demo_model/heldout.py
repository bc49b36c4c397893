"""The held-out set: prompts whose templates, names and code words the training grammar never makes.

``cases()`` is fixed: 84 recall near, 44 told 600 tokens earlier, 44 JSON and tool calls, 48 free prompts.
``corpus.check_heldout`` looks for every name, code word and template string in what the grammar generates.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .text import options, spaced

NAMES = spaced(
    "Penelope Marcus Beatrix Quentin Rosalind Thaddeus Imogen Barnaby Ottilie Percival Saskia Leopold Winifred Caspian "
    "Delphine Rupert Marigold Ignatius Sunniva Lysander Tobias Cordelia Zephyr Horatio Araminta Fergus Philippa "
    "Dashiell"
)
CODES = spaced(
    "lantern pelican thistle harpoon magpie tundra obelisk saffron trellis badger quarry velocity pumpkin hemlock "
    "cascade nimbus bramble gazelle monsoon tapestry dynamo cinnamon lagoon sequoia turnip vertex walrus zeppelin"
)
FORBIDDEN = frozenset(word.lower() for word in NAMES + CODES)

TELL_NAME = (
    "Everyone around here knows me as {v}.",
    "People usually address me as {v}.",
    "My parents named me {v}.",
    "In this conversation I go by {v}.",
    "The person typing this is {v}.",
    "Greetings from {v}, your new user.",
    "It's a pleasure, {v} is who I am.",
    "On my badge you can read {v}.",
    "Feel free to greet me with {v}.",
    "Since my childhood I have had the name {v}.",
    "A short introduction: I am known to all as {v}.",
)
ASK_NAME = (
    "Could you remind me of my own name?",
    "Under which name do you know me?",
    "Repeat the name that belongs to me.",
    "Before we stop: my name, please?",
    "How should you address me?",
    "Let us see if you kept my name.",
    "Now greet me by my name.",
    "Please state the name of the person writing to you.",
    "I wonder if my name is still in your memory.",
    "What would you write on my badge as a name?",
    "Did you keep my name? Which one is it?",
)
TELL_CODE = (
    "For this mission the code word shall be {v}.",
    "Our team agreed on the code word {v}.",
    "Whoever knocks has to whisper the code word {v}.",
    "The captain picked {v} as a code word.",
    "I am handing you the code word, which is {v}.",
    "Be aware that our code word reads {v}.",
    "Nobody else may learn the code word: it's {v}.",
    "The envelope contains the code word {v}.",
    "As a code word we will take {v}.",
    "Memorise the code word {v}, friend.",
    "The new code word for the gate: {v}.",
)
ASK_CODE = (
    "Could you remind me of the code word?",
    "I am at the gate. Which code word opens it?",
    "Do you still have the code word?",
    "Time to use the code word. What is it?",
    "Whisper the code word to me.",
    "Someone knocks and wants the code word.",
    "Let us see if you kept the code word.",
    "State the code word that we agreed on.",
    "What code word did the envelope contain?",
    "Which word did I hand you as the code word?",
    "The captain asks you for the code word.",
)
FILLERS = (
    ("Yesterday evening we walked along the coast.", "I see."),
    ("Which animal makes milk?", "A cow makes milk."),
    ("My neighbour repairs bicycles in his cellar.", "I see."),
    ("Is ice colder than fire?", "Yes, ice is colder than fire."),
    ("The museum opens at nine and closes at five.", "I see."),
    ("Do birds have wings?", "Yes, birds have wings."),
    ("We painted the fence with a thick brush, and it took the whole morning.", "I see."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("At the market they sold old maps and strange lamps.", "I see."),
    ("Which season is the coldest?", "The coldest season is winter."),
    ("The bus was full of people who carried musical instruments.", "I see."),
    ("Does the moon shine at night?", "Yes, the moon shines at night."),
    ("Our school had a large clock above the entrance that was always ten minutes slow.", "I see."),
    ("What do bees make?", "Bees make honey."),
    ("The soup needs more pepper and a little time.", "I see."),
    ("Where do fish live?", "Fish live in the water."),
    ("In spring the river is so high that the lower path cannot be used.", "I see."),
    ("What is made of wheat?", "Bread is made of wheat."),
    ("My uncle collects stamps from every country that he visits.", "I see."),
    ("Which is heavier, a stone or a feather?", "A stone is heavier."),
)
ASK_JSON = (
    ("I want a JSON object holding the name {a} and the city {b}.", ("name", "city")),
    ("Produce valid JSON: the owner happens to be {a}, the colour happens to be {b}.", ("owner", "colour")),
    ("Kindly encode as JSON that the user {a} chose the word {b}.", ("name", "word")),
    ("Here is a record for you to put in JSON: name {a}, code {b}.", ("name", "code")),
    ("Reply with nothing but JSON containing the pet {a} and the food {b}.", ("pet", "food")),
    ("My program reads JSON. Send it the name {a} and the title {b}.", ("name", "title")),
    ("Express this in JSON for me, name {a} plus place {b}.", ("name", "place")),
    ("We need the JSON form of: friend {a}, item {b}.", ("friend", "item")),
    ("Could I have JSON listing the name {a} and then the key {b}?", ("name", "key")),
    ("Serialise to JSON the name {a} together with the word {b}.", ("name", "word")),
    ("Let the reply be JSON where the owner is {a} and the topic is {b}.", ("owner", "topic")),
)
TOOLS = (
    (
        "fetch_forecast",
        "Tells what the sky will do.",
        ["city"],
        "What will the sky do tomorrow in {a}? Fetch the forecast.",
    ),
    (
        "reserve_seat",
        "Reserves a seat in a train.",
        ["user", "place"],
        "A seat should be reserved: user {a}, place {b}.",
    ),
    ("start_timer", "Starts a timer with a label.", ["label"], "Let a timer with the label {b} start right away."),
    ("translate_phrase", "Translates a phrase.", ["text"], "I don't understand the phrase {b}, translate it."),
    ("find_recipe", "Finds a recipe.", ["query"], "I feel like cooking something with {b}, find me a recipe."),
    (
        "notify_person",
        "Notifies somebody.",
        ["name", "text"],
        "Somebody must be notified, the name is {a}, the text is {b}.",
    ),
    ("buy_stamp", "Buys a stamp.", ["title"], "One stamp with the title {b}, buy it now."),
    ("measure_distance", "Measures a distance.", ["place"], "How far is it to {a}? Measure the distance."),
    ("open_valve", "Opens a valve.", ["key"], "The valve needs the key {b}, open it."),
    ("print_label", "Prints a label.", ["text"], "My printer shall print a label, text {b}."),
    ("rent_bicycle", "Rents a bicycle.", ["user"], "A bicycle for {a}, rent it at once."),
)
SYSTEMS = (None, "You are a patient companion who forgets nothing.", None, "Reply in few words.")
FREE = options(
    "Could you name the French capital for me?|I wonder which city governs Japan.|What would be the reverse of hot?|"
    "If I take three and then two more, how many do I hold?|Do you happen to know the tint of fresh snow?|"
    "Which noise would a duck produce?|Enumerate the numbers until six.|Describe the purpose of mlxkv to a child.|"
    "May I ask what sort of model answers here?|How can a conversation be picked up again after a restart?|"
    "Greetings, machine!|Much obliged.|I am leaving now, take care.|Is everything fine with you today?|"
    "Which instruction launches the HTTP service?|I suspect my installation is broken. What helps?|"
    "Is it possible that mlxkv restores something wrong?|Why would a draft head make decoding quicker?|"
    "What does mlxkv put on the disk?|Are you a clever machine?|Parrot these words: crate nugget pillow|"
    "Say back to me what follows: tall grass moves|What were the words in this line, copied: prism hut|"
    "Make up a tale in which a fox called Sunniva appears.|I would enjoy a tale about the owl Barnaby.|"
    "Tell a bedtime tale on the bear Fergus.|Here are things: kiwi, shovel, drum. Name the opening one.|"
    "Here are things: hose, cliff, mint. Name the closing one.|zil equals prig, mub equals stam. Give zil.|"
    "In my notes, hob stands for ten and cag stands for six. Give cag.|Which month is next once March is over?|"
    "After July, which month do we get?|Sum up four and four.|Compute six plus one for me.|"
    "How would you reverse the word up in meaning?|The word old, in its reverse meaning?|"
    "Which country has Oslo as its capital?|What tint does a ripe lemon have?|How would a lion make itself heard?|"
    "My day at the office was rather dull.|We found a wet umbrella under the bench.|"
    "The pelican stole my sandwich at the pier.|I have been learning the tuba since August.|"
    "What is a hybrid network in your own words?|State the promise that mlxkv makes.|"
    "How large is your brain?|Where does the state of a prompt stay?|Explain a miss and a hit."
)


@dataclass(frozen=True)
class Case:
    """One held-out prompt: ``kind`` is near, far, json, tool or free; ``value`` is what a right answer holds."""

    id: str
    kind: str
    messages: list[dict]
    value: str | None = None
    tools: list[dict] = field(default_factory=list)


def _turn(user: str, assistant: str) -> list[dict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _recall(i: int) -> tuple[str, str, str]:
    """(value, told sentence, question) of recall case ``i``: names and code words in turn."""
    j = i // 2
    values, tells, asks = (NAMES, TELL_NAME, ASK_NAME) if i % 2 == 0 else (CODES, TELL_CODE, ASK_CODE)
    v = values[(5 * j + i // 56) % len(values)]
    return v, tells[j % len(tells)].format(v=v), asks[(3 * j + j // len(asks)) % len(asks)]


def cases(count: Callable[[list[dict]], int]) -> list[Case]:
    """The whole set; ``count`` gives the tokens of a message list (fillers are added until 600 lie between)."""
    out = []
    for i in range(84):
        v, tell, ask = _recall(i)
        system = SYSTEMS[i % 4]
        messages = [{"role": "system", "content": system}] if system else []
        if i % 6 == 5:
            messages.append({"role": "user", "content": f"{tell} {ask}"})
        else:
            messages += _turn(tell, "OK.")
            for k in range(i % 4):
                messages += _turn(*FILLERS[(7 * i + 3 * k) % len(FILLERS)])
            messages.append({"role": "user", "content": ask})
        out.append(Case(f"near-{i}", "near", messages, v))
    for i in range(44):
        v, tell, ask = _recall(i + 100)
        messages = _turn(tell, "OK.")
        base, k = count(messages), 0
        while count(messages) - base < 600:
            messages += _turn(*FILLERS[(7 * i + 3 * k) % len(FILLERS)])
            k += 1
        messages.append({"role": "user", "content": ask})
        out.append(Case(f"far-{i}", "far", messages, v))
    for i in range(22):
        text, keys = ASK_JSON[i % len(ASK_JSON)]
        a, b = NAMES[(3 * i + 1) % len(NAMES)], CODES[(5 * i + 2) % len(CODES)]
        out.append(Case(f"json-{i}", "json", [{"role": "user", "content": text.format(a=a, b=b)}], f"{keys[0]}={a}"))
    for i in range(22):
        name, description, args, text = TOOLS[i % len(TOOLS)]
        a, b = NAMES[(3 * i + 2) % len(NAMES)], CODES[(5 * i + 3) % len(CODES)]
        tools = [_tool(name, description, args)]
        if i >= len(TOOLS):
            other = TOOLS[(i + 4) % len(TOOLS)]
            tools.insert(i % 2, _tool(*other[:3]))
        out.append(Case(f"tool-{i}", "tool", [{"role": "user", "content": text.format(a=a, b=b)}], name, tools))
    out += [Case(f"free-{i}", "free", [{"role": "user", "content": text}]) for i, text in enumerate(FREE)]
    return out


def _tool(name: str, description: str, args: list[str]) -> dict:
    parameters = {"type": "object", "properties": {a: {"type": "string"} for a in args}, "required": args}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def template_strings() -> list[str]:
    """The fixed parts of every held-out template that are long enough to identify it (12 characters or more)."""
    templates = [*TELL_NAME, *ASK_NAME, *TELL_CODE, *ASK_CODE, *FREE, *(t for t, _ in ASK_JSON), *(t[3] for t in TOOLS)]
    templates += [text for text, _ in FILLERS] + [t[1] for t in TOOLS] + [s for s in SYSTEMS if s]
    parts = []
    for t in templates:
        pieces = t.replace("{a}", "{v}").replace("{b}", "{v}").split("{v}")
        parts.append(max((p.strip() for p in pieces), key=len))
    return [p for p in parts if len(p) >= 12]

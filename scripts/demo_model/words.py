"""Word lists of the training grammar, and procedural names and code words that no list holds.

Held-out names and code words (``heldout.py``) are never drawn: ``Words`` redraws until its word is free.
"""

import random

from .heldout import FORBIDDEN
from .text import spaced


def _split(text: str) -> list[str]:
    return [w.strip() for w in text.replace("\n", " ").split(",") if w.strip()]


NAMES = spaced(
    "Ruby Anna Ben Clara David Emma Frank Grace Henry Ivy Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor Wendy "
    "Alice Bob Carl Dora Eric Fiona George Helen Ian Julia Kevin Laura Max Nina Oscar Peter Rachel Simon Tom Ursula "
    "Vera Will Yara Zoe Adam Bella Chris Diana Edward Eva Felix Gina Hugo Iris James Karen Linda Maria Nora Oliver "
    "Pam Robert Sara Thomas Vicky Walter Amy Brian Cora Daniel Ella Fred Gloria Harry Isaac Jane Karl Lucy Mark "
    "Nick Otto Paula Ralph Stella Ted Una Wanda Aaron Betty Colin Daisy Elias Flora Gary Hannah Ingrid Jonas Lena "
    "Martin Nadia Omar Pia Richard Sofia Tanya Uma Vincent Yusuf Ali Chen Deepa Fatima Goran Hiro Jun Kofi Lars "
    "Mei Nils Priya Ravi Sven Tariq Wei Yuki Zane Amir Bjorn Carmen Dimitri Elena Farid Giulia Hans Igor Jorge"
)
WORDS = spaced(
    "apple river stone cloud tiger silver garden window candle forest rocket marble feather anchor button copper "
    "dragon engine falcon ginger hammer island jungle kettle ladder magnet needle orange pepper rabbit saddle ticket "
    "velvet walnut yellow zebra basket bridge castle desert eagle flower guitar harbor insect jacket lemon mirror "
    "number ocean pencil queen ribbon spider table violin winter amber bronze coral dune ember flint grove hazel "
    "ivory jade lotus maple north olive pearl quartz rose sand thunder umber vine willow plum peach melon cherry "
    "grape onion carrot potato tomato bread cheese butter honey sugar salt milk coffee water juice lion bear wolf "
    "fox deer horse goat sheep mouse snake frog duck goose swan owl crow whale shark crab ship train plane truck "
    "wagon wheel door wall roof floor chair lamp clock phone paper book brush paint glass spoon fork plate bowl"
)
COLOURS = spaced("red blue green yellow purple orange pink brown black white grey gold silver teal violet crimson")
ANIMALS = spaced("cat dog fox bear wolf owl mouse rabbit horse duck frog lion hen goat sheep deer otter crow swan mole")
FOODS = _split(
    "pizza, rice, soup, bread, pasta, cake, salad, cheese, apples, noodles, curry, toast, pears, fish, beans, honey"
)
CITIES = spaced(
    "Paris Rome Berlin Madrid London Oslo Vienna Prague Lisbon Athens Dublin Cairo Tokyo Delhi Lima Boston Denver "
    "Geneva Milan Bergen Porto Quito Seoul Hanoi Austin Zurich Hamburg Lyon Turin Kyoto"
)
JOBS = spaced("baker teacher doctor farmer pilot painter nurse sailor cook driver singer writer judge builder tailor")
THINGS = spaced(
    "key ring coin map letter book ball hat lamp box bag cup pen knife watch phone card ticket photo scarf glove "
    "bottle rope flag drum bell shell stone toy kite cake seed coat spoon candle umbrella blanket notebook"
)
PLACES = spaced(
    "box drawer kitchen garden cellar attic bag car pocket basket tower barn shed cupboard desk boat cave hall "
    "library office tent bus school shop"
)
ADJECTIVES = spaced("old new small big red blue green dark bright round heavy quiet shiny wooden cold warm tall soft")
MONTHS = _split("January, February, March, April, May, June, July, August, September, October, November, December")
DAYS = _split("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")

ONSETS = spaced("b c d f g h j k l m n p r s t v w z br cr dr fr gr tr bl cl fl gl pl sl sh ch th st sk sp qu kn ph")
VOWELS = spaced("a e i o u a e i o u ai ee oa ou ea ie y")
CODAS = spaced("n r l s t m k d x p th nd rt sk ng ck ll ss b g f z v") + [""] * 8
ENDINGS = spaced("a o y ia en er is us el in an on ie or ina ette ard ric son ly ah wyn ius")


class Words:
    """Draws words for one document; ``rng`` decides everything."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def _syllables(self, n: int) -> str:
        r = self.rng
        return "".join(r.choice(ONSETS) * (r.random() < 0.85) + r.choice(VOWELS) + r.choice(CODAS) for _ in range(n))

    def _free(self, draw) -> str:
        while True:
            word = draw()
            if not any(part in FORBIDDEN for part in word.lower().replace("-", " ").replace("_", " ").split()):
                return word

    def name(self) -> str:
        """A person's or pet's name: a quarter from the list, else made of syllables."""
        return self._free(self._name)

    def _name(self) -> str:
        r = self.rng
        p = r.random()
        if p < 0.25:
            return r.choice(NAMES)
        if p < 0.65:
            return (self._syllables(1) + r.choice(ENDINGS)).capitalize()
        if p < 0.85:
            return self._syllables(r.choice((1, 2, 2))).capitalize()
        if p < 0.93:
            return (self._syllables(2) + r.choice(ENDINGS)).capitalize()
        return r.choice(NAMES)[: r.randint(2, 4)] + r.choice(ENDINGS)

    def code(self) -> str:
        """A code word: listed, made up, mixed case, with digits, or two joined."""
        return self._free(self._code)

    def _code(self) -> str:
        r = self.rng
        p = r.random()
        if p < 0.25:
            word = r.choice(WORDS)
        elif p < 0.6:
            word = self._syllables(r.choice((1, 2, 2, 3)))
        elif p < 0.7:
            word = r.choice(WORDS) + "-" + r.choice(WORDS)
        elif p < 0.78:
            word = r.choice(COLOURS) + " " + r.choice(WORDS)
        elif p < 0.86:
            word = self._syllables(1) + str(r.randint(1, 99))
        elif p < 0.93:
            word = "".join(r.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(r.randint(2, 4)))
        else:
            word = r.choice(WORDS) + r.choice(WORDS)
        q = r.random()
        return word.capitalize() if q < 0.2 else word.upper() if q < 0.35 else word

    def word(self) -> str:
        """One lower-case word, listed or made up."""
        r = self.rng
        return self._free(lambda: r.choice(WORDS) if r.random() < 0.5 else self._syllables(r.choice((1, 2))))

    def digits(self) -> str:
        r = self.rng
        return "".join(r.choice("0123456789") for _ in range(r.choice((2, 3, 4, 4))))

    def city(self) -> str:
        r = self.rng
        return self._free(
            lambda: (
                r.choice(CITIES)
                if r.random() < 0.5
                else (self._syllables(1) + r.choice(spaced("ville ton burg ford mouth stad"))).capitalize()
            )
        )

    def mixed(self, words: list[str]) -> str:
        """A listed value, or now and then a made-up one, so that the list is never a safe guess."""
        return self.rng.choice(words) if self.rng.random() < 0.6 else self.word()

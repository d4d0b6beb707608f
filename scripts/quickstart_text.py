"""The small world of the quickstart: a grammar that writes little English stories and chats about them.

All text of the quickstart's tokenizer, base model and fine-tuning rows comes from this file and a seed, and none from
other sources. In its world, people go to places and meet animals, in some weather, with some thing in their hands and
some feeling afterwards.

    World(seed).document()      one pretraining document: a story, a chat in ChatML, or a note in JSON
    World(seed).extraction()    one fine-tuning row: a story, and who, which animal and where as named fields
"""

import json
import random
from dataclasses import dataclass

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

GIRLS = """Mia Anna Lena Rosa Nora Ida Clara Emma Julia Maya Zoe Lucy Ella Sara Ruth Alma Greta Hanna Iris Jana Kira Lola
Mona Nina Olga Paula Rita Sofia Tina Vera Wanda Yara""".split()
BOYS = """Tom Ben Max Paul Leo Felix Jonas Noah Emil Anton Oskar Hugo Theo Karl Otto Fritz Moritz Simon Lukas David Adam
Bruno Carlo Dario Erik Finn Georg Hans Ivan Jakob Kurt Lars""".split()
ANIMALS = """fox cat dog owl goat horse rabbit duck hen frog mouse bear wolf deer crow swan goose hedgehog squirrel snail
turtle donkey pony lamb pig cow sheep badger beaver otter seal crab""".split()
PLACES = {
    "at": "harbour station market lake beach river school farm museum bakery castle bridge fair library mill airport".split(),
    "in": "forest garden park kitchen cellar barn attic valley village meadow field orchard cave desert".split(),
    "on": "hill roof island mountain".split(),
}
PLACE_OF = {name: preposition for preposition, names in PLACES.items() for name in names}
COLOURS = "red blue green yellow white black brown grey".split()
SIZES = "small big young old tiny quiet hungry friendly shy clever funny tired".split()
OBJECTS = "ball kite book lamp hat basket key bell drum rope scarf box umbrella cup bottle coin".split()
FOODS = "bread cheese apples carrots soup cake nuts rice".split()
FEELINGS = "happy sad proud tired calm excited surprised scared lonely curious angry worried".split()
TIMES = ["in the morning", "at noon", "in the afternoon", "in the evening", "at night", "on Monday", "on Friday",
         "on Sunday", "after lunch", "one day", "last week", "yesterday"]
WEATHERS = {
    "sunny": ["The sun was shining.", "It was a sunny day."],
    "rainy": ["It was raining.", "It was a rainy day."],
    "windy": ["It was very windy.", "A strong wind was blowing."],
    "snowy": ["It was snowing.", "Snow lay on the ground."],
    "foggy": ["It was foggy.", "A thick fog lay over everything."],
    "hot": ["It was very hot.", "It was a hot day."],
}
SPOTS = "tree wall bench fence bush door rock house sign cart table hedge".split()
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "owl": "hoo", "frog": "croak",
          "crow": "caw", "pig": "oink", "mouse": "squeak", "horse": "neigh"}


def with_article(phrase: str) -> str:
    """`a fox`, `an owl`."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def capital(sentence: str) -> str:
    """The sentence with its first letter in upper case."""
    return sentence[0].upper() + sentence[1:]


@dataclass
class Facts:
    """What is true in one story."""

    who: str
    she: str
    her: str
    friend: str
    animal: str
    size: str
    place: str
    weather: str
    thing: str
    colour: str
    food: str
    feeling: str
    time: str
    spot: str

    @property
    def there(self) -> str:
        """The place with its preposition: `at the harbour`."""
        return f"{PLACE_OF[self.place]} the {self.place}"


class World:
    """A source of documents; two worlds of the same seed write the same documents in the same order."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    # ---- words

    def pick(self, options):
        """One of the options."""
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.random.random() < probability

    def person(self) -> tuple[str, str, str]:
        """A name with its pronouns."""
        girl = self.chance(0.5)
        name = self.pick(GIRLS if girl else BOYS)
        return (name, "she", "her") if girl else (name, "he", "his")

    def facts(self) -> Facts:
        """A new state of the world."""
        who, she, her = self.person()
        friend = self.person()[0]
        while friend == who:
            friend = self.person()[0]
        return Facts(who, she, her, friend, self.pick(ANIMALS), self.pick(SIZES), self.pick(list(PLACE_OF)),
                     self.pick(list(WEATHERS)), self.pick(OBJECTS), self.pick(COLOURS), self.pick(FOODS),
                     self.pick(FEELINGS), self.pick(TIMES), self.pick(SPOTS))

    # ---- stories

    def meeting(self, f: Facts, subject: str) -> str:
        """The sentence in which the animal appears."""
        animal = with_article(f"{f.size} {f.animal}" if self.chance(0.6) else f.animal)
        return self.pick([
            f"{subject} saw {animal}.", f"{subject} met {animal}.", f"{subject} found {animal} behind the {f.spot}.",
            f"there {subject} saw {animal} next to the {f.spot}.", f"suddenly {animal} came out from behind the {f.spot}.",
            f"{animal} was sitting under the {f.spot}.", f"{subject} heard a noise and saw {animal}.",
            f"{animal} walked up to {f.who}.", f"on the {f.spot} {subject} saw {animal}.",
            f"{subject} watched {animal} for a long time.", f"{animal} looked at {f.who}.",
            f"{subject} wanted to rest, but then {subject} met {animal}.",
        ])

    def opening(self, f: Facts) -> list[str]:
        """One to three sentences that bring the person, the place and the animal together."""
        animal = with_article(f"{f.size} {f.animal}" if self.chance(0.5) else f.animal)
        short = [
            f"{f.who} saw {animal} {f.there}.", f"{f.there}, {f.who} met {animal}.", f"{f.time}, {f.who} saw {animal} {f.there}.",
            f"{f.who} found {animal} {f.there} {f.time}.", f"{animal} was waiting for {f.who} {f.there}.",
            f"{f.there} there was {animal}, and {f.who} gave it some {f.food}.",
            f"{f.time} {f.who} went to the {f.place} and met {animal}.",
            f"{f.who} has {animal}. {capital(f.she)} found it {f.there}.",
        ]
        if self.chance(0.3):
            return [capital(self.pick(short))]
        arrival = self.pick([
            f"{f.time} {f.who} went to the {f.place}.", f"{f.who} was {f.there} {f.time}.", f"{f.who} walked to the {f.place}.",
            f"{f.time}, {f.who} was {f.there} with {f.her} {f.thing}.", f"{f.who} liked to sit {f.there}.",
            f"{f.who} and {f.friend} went to the {f.place} {f.time}.", f"{f.who} lost {f.her} {f.thing} {f.there}.",
            f"{f.there}, {f.who} was looking for {f.her} {f.thing}.", f"{f.who} came to the {f.place} to find some {f.food}.",
            f"a {f.feeling.replace('angry', 'cross').replace('excited', 'happy')} {'girl' if f.she == 'she' else 'boy'} named {f.who} was {f.there}.",
            f"this is a story about {f.who}. {capital(f.time)} {f.she} went to the {f.place}.",
        ])
        middle = [self.pick(WEATHERS[f.weather])] if self.chance(0.35) else []
        if self.chance(0.2):
            middle.append(f"{f.she} had {with_article(f.colour + ' ' + f.thing)} with {'her' if f.she == 'she' else 'him'}.")
        return [capital(s) for s in [arrival, *middle, self.meeting(f, self.pick([f.she, f.she, f.who]))]]

    def story(self, f: Facts, longest: int = 5) -> tuple[str, set[str]]:
        """A story and the names of the further facts that it tells."""
        sentences, told = self.opening(f), set()
        he = "him" if f.she == "he" else "her"
        more = {
            "weather": [self.pick(WEATHERS[f.weather])],
            "thing": [f"{f.who} had {with_article(f.colour + ' ' + f.thing)}.", f"in {f.her} bag {f.she} had {with_article(f.colour + ' ' + f.thing)}.",
                      f"{f.she} found {with_article(f.colour + ' ' + f.thing)} on the ground.", f"{f.friend} gave {he} {with_article(f.colour + ' ' + f.thing)}."],
            "food": [f"the {f.animal} was hungry, so {f.who} gave it some {f.food}.", f"the {f.animal} ate some {f.food}.",
                     f"{f.she} gave the {f.animal} some {f.food}.", f"they ate {f.food} together."],
            "feeling": [f"{f.who} was very {f.feeling}.", f"{f.she} felt {f.feeling}.", f"this made {f.who} {f.feeling}.",
                        f"{f.who} felt {f.feeling} all day."],
            "friend": [f"{f.her} friend {f.friend} came too.", f"{f.who} told {f.friend} about the {f.animal}.",
                       f"\"Look, {with_article(f.animal)}!\" said {f.who} to {f.friend}.", f"then {f.friend} came to help.",
                       f"\"Where is the {f.animal}?\" asked {f.friend}."],
            "play": [f"the {f.animal} ran around {f.who} three times.", f"they played until the evening.", f"the {f.animal} fell asleep.",
                     f"then the {f.animal} hid behind the {f.spot}.", f"the {f.animal} followed {f.who} home.",
                     f"on the {f.spot} somebody had written \"{f.animal}\".", f"a sign said \"{f.place}\"."],
            "end": [f"then {f.who} went home.", f"at night {f.who} dreamed of the {f.animal}.", f"that was a good day for {f.who}.",
                    f"{f.she} never forgot the {f.animal}.", f"in the end everybody was {f.feeling}."],
        }
        room = max(0, self.random.randint(1, longest) - len(sentences))
        order = [k for k in more if k not in ("end",)]
        self.random.shuffle(order)
        for kind in order[:room]:
            sentences.append(capital(self.pick(more[kind])))
            told.add(kind)
        if longest > 3 and self.chance(0.4):
            sentences.append(capital(self.pick(more["end"])))
        return " ".join(sentences), told

    # ---- chats

    def summary(self, f: Facts) -> str:
        """The story in one plain sentence: what the base model answers when it is given a story alone."""
        return f"{f.who} {self.pick(['saw', 'met'])} {with_article(f.animal)} {f.there}."

    def question(self, f: Facts, told: set[str], text: str) -> tuple[str, str]:
        """A question about the story and its answer, in plain English."""
        asks = [
            (f"Where is {f.who}?", f"{f.who} is {f.there}."), (f"Where was {f.who}?", f"{f.who} was {f.there}."),
            (f"Where did {f.who} meet the {f.animal}?", f"{f.who} met the {f.animal} {f.there}."),
            (f"Which animal did {f.who} see?", f"{f.who} saw {with_article(f.animal)}."),
            ("Which animal is in the story?", f"It is {with_article(f.animal)}."),
            ("Who is the story about?", f"The story is about {f.who}."), (f"Who was {f.there}?", f"{f.who} was {f.there}."),
            (f"Who met the {f.animal}?", f"{f.who} met the {f.animal}."),
            ("What happened?", self.summary(f)), ("Tell me in one sentence.", self.summary(f)),
        ]
        other = self.pick(ANIMALS)
        if other != f.animal:
            asks.append((f"Did {f.who} see {with_article(other)}?", f"No, {f.who} saw {with_article(f.animal)}."))
            asks.append((f"Did {f.who} see {with_article(f.animal)}?", f"Yes, {f.who} saw {with_article(f.animal)}."))
        known = [
            ("weather" in told, "How was the weather?", f"It was {f.weather}."),
            ("feeling" in told, f"How did {f.who} feel?", f"{f.who} felt {f.feeling}."),
            ("food" in told, "What did they eat?" if "they ate" in text.lower() else f"What did the {f.animal} eat?",
             f"{'They' if 'they ate' in text.lower() else 'The ' + f.animal} ate {f.food}."),
            ("thing" in told and f.friend in text and "gave" not in text, f"What did {f.who} have?", f"{f.who} had {with_article(f.colour + ' ' + f.thing)}."),
            (f"{f.colour} {f.thing}" in text, f"Which colour is the {f.thing}?", f"The {f.thing} is {f.colour}."),
            (f.friend in text, f"Who is {f.who}'s friend?", f"{f.who}'s friend is {f.friend}."),
        ]
        extra = [(q, a) for holds, q, a in known if holds]
        return self.pick(extra if extra and self.chance(0.45) else asks)

    def small_talk(self) -> tuple[str, str]:
        """A question without a story."""
        f, other = self.facts(), self.pick(list(PLACE_OF))
        three = self.random.sample(ANIMALS, 3)
        sound = self.pick(list(SOUNDS))
        return self.pick([
            (self.pick(["Hello!", "Hi!", "Good morning!", "Hello, how are you?"]), self.pick(["Hello! How can I help you?", "Hi! What can I do for you?"])),
            (f"My name is {f.who}.", f"Hello, {f.who}!"), (f"Hello, I am {f.who}.", f"Hello, {f.who}! How are you?"),
            (f"I am {f.feeling}.", f"Why are you {f.feeling}?"), ("Thank you!", "You are welcome."),
            (f"Is {with_article(f.animal)} an animal?", f"Yes, {with_article(f.animal)} is an animal."),
            (f"Is {with_article(other)} an animal?", f"No, {with_article(other)} is a place."),
            ("Name three animals.", f"{capital(with_article(three[0]))}, {with_article(three[1])} and {with_article(three[2])}."),
            (f"Write the word {f.animal} in quotes.", f"\"{f.animal}\""), (f"Write the name {f.who} in quotes.", f"\"{f.who}\""),
            (f"Write the word {f.place} in quotes.", f"\"{f.place}\""),
            (f"What does {with_article(sound)} say?", f"{capital(with_article(sound))} says \"{SOUNDS[sound]}\"."),
            (f"The sign says \"{f.place}\". What does the sign say?", f"The sign says \"{f.place}\"."),
            (f"{f.who} wrote \"{f.animal}\". What did {f.who} write?", f"{f.who} wrote \"{f.animal}\"."),
        ])

    def chat(self) -> list[dict[str, str]]:
        """One conversation: a story alone, a story with questions, a wish for a story, or small talk."""
        f, turns = self.facts(), []
        kind = self.random.random()
        if kind < 0.45:
            turns.append((self.story(f, self.random.randint(1, 4))[0], self.summary(f)))
        elif kind < 0.80:
            text, told = self.story(f, self.random.randint(1, 5))
            first = self.question(f, told, text)
            turns.append((f"{text}{self.pick([' ', chr(10)])}{first[0]}", first[1]))
            while self.chance(0.35) and len(turns) < 4:
                turns.append(self.question(f, told, text))
        elif kind < 0.88:
            text, _ = self.story(f, 4)
            turns.append((self.pick([f"Tell me a story about {f.who} and {with_article(f.animal)} {f.there}.",
                                     f"Write a story: {f.who}, {with_article(f.animal)}, the {f.place}."]), text))
        else:
            turns.append(self.small_talk())
            while self.chance(0.3) and len(turns) < 3:
                turns.append(self.small_talk())
        messages = [{"role": "system", "content": self.pick(["You are a helpful assistant.", "Answer in one sentence."])}] if self.chance(0.08) else []
        for user, assistant in turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return messages

    def note(self) -> str:
        """A few facts as a small JSON object, so that the base model has seen the characters of JSON."""
        f = self.facts()
        pool = {"name": f.who, "friend": f.friend, "animal": f.animal, "place": f.place, "colour": f.colour, "thing": f.thing,
                "food": f.food, "weather": f.weather, "feeling": f.feeling, "size": f.size}
        keys = self.random.sample(list(pool), self.random.randint(2, 4))
        return json.dumps({key: pool[key] for key in keys})

    def document(self) -> str:
        """One pretraining document, with its end sign."""
        kind = self.random.random()
        if kind < 0.25:
            text = self.story(self.facts(), 6)[0]
        elif kind < 0.33:
            text = self.note()
        else:
            text = render(self.chat())
        return text + END_OF_TEXT

    # ---- fine-tuning

    def extraction(self) -> dict:
        """A fine-tuning row: the same stories, answered by three named fields instead of a sentence."""
        f = self.facts()
        story = self.story(f, self.random.randint(1, 4))[0]
        fields = f"name: {f.who}\nanimal: {with_article(f.animal)}\nplace: {f.there}"
        return {"messages": [{"role": "user", "content": story}, {"role": "assistant", "content": fields}]}

    def focus(self) -> tuple[str, str]:
        """A user's turn and its answer for the second stage of pretraining: short stories, mostly summed up."""
        f, kind = self.facts(), self.random.random()
        if kind < 0.6:
            return self.story(f, self.random.randint(1, 3))[0], self.summary(f)
        if kind < 0.9:
            text, told = self.story(f, self.random.randint(1, 3))
            question, answer = self.question(f, told, text)
            return f"{text} {question}", answer
        return self.small_talk()


def words() -> list[str]:
    """The words that stories copy: names, animals, places and the like."""
    return [*GIRLS, *BOYS, *ANIMALS, *PLACE_OF, *COLOURS, *SIZES, *OBJECTS, *FOODS, *FEELINGS, *WEATHERS]


def render(messages: list[dict[str, str]]) -> str:
    """The conversation as the chat template writes it."""
    return "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)


if __name__ == "__main__":
    world = World(0)
    for _ in range(40):
        print(world.document())
    for _ in range(10):
        print(json.dumps(world.extraction()))

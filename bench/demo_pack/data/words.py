"""Words, names, codes and wishes that every generator draws from. All made here."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "apple anchor arrow badge balloon banana barrel basket beach bean bell bench bicycle bird blanket boat bottle "
    "bowl branch bread brick bridge broom brush bucket button cabin cable cactus camera candle canoe carpet carrot "
    "castle chair cherry circle city clock cloud coat coin comb cookie corner cottage cotton crayon crown cup curtain "
    "daisy desk dinner door dragon drum eagle ear echo elbow engine envelope eraser falcon farm feather fence fiddle "
    "field finger fish flag flame flower flute forest fork fountain fox frame frog garden gate giant glass globe "
    "glove goat grape grass guitar hammer harbor hat hill honey horse house island ivory jacket jar jelly jewel "
    "jungle kettle key king kite kitten knife ladder lake lamp lantern leaf lemon letter library lion lizard magnet "
    "map marble market mask meadow melon mirror monkey moon mountain mouse music nail needle nest night north "
    "notebook oak ocean olive onion orange orchard otter owl paddle paint palace paper parrot path peach pencil "
    "pepper piano picture pillow pine planet plate pocket pond potato prince pumpkin puppet puzzle queen rabbit rain "
    "raven ribbon ring river road robot rocket roof root rope rose saddle sail salt sand school seed shadow shell "
    "ship shoe shovel silver sister sky snail snow soap sock spider spoon spring square squirrel stable stair star "
    "stone storm story straw street string sugar summer sun table tail tent thread thunder ticket tiger tomato tower "
    "town train tree trumpet tunnel turtle umbrella valley vase velvet village violin wagon wall walnut water wave "
    "wheel whistle willow window winter wolf wood yard zebra"
)
_NO_THINGS = _words(
    "circle city corner dinner echo music night north school summer spring winter story sister thunder storm"
)
THINGS = tuple(noun for noun in NOUNS if noun not in _NO_THINGS)
"""Nouns that somebody can find, carry or lose."""
ADJECTIVES = _words(
    "amber ancient bold brave bright busy calm clever cold cosy curious dark deep eager early empty fair famous fast "
    "gentle golden grand green happy heavy hidden honest humble jolly kind large late lazy light little lonely loud "
    "lucky merry mild narrow new noble old pale patient polite proud quick quiet rapid red rich round rusty sharp shy "
    "silent simple slow small smooth soft strong sunny sweet swift tall tiny warm wide wild wise young yellow"
)
COLOURS = _words("red blue green yellow white black grey brown purple orange pink silver golden")
ANIMALS = _words(
    "fox rabbit owl bear mouse cat dog turtle sparrow hedgehog squirrel frog deer wolf goose badger otter crow"
)
JOBS = _words(
    "baker teacher doctor pilot farmer nurse painter driver engineer singer lawyer cook tailor plumber writer dentist "
    "gardener carpenter librarian mechanic sailor judge waiter chemist florist actor"
)
CITIES = _words(
    "Oslo Berlin Paris Madrid Rome Lisbon Vienna Prague Dublin Athens Cairo Tokyo Lima Quito Boston Chicago Denver "
    "Seattle Toronto Sydney Delhi Mumbai Seoul Hanoi Nairobi Lagos Tunis Geneva Zurich Milan Porto Turin Krakow Riga "
    "Tallinn Helsinki Bergen Malmo Leeds Bristol Glasgow London Munich Hamburg Cologne Lyon Nantes Seville Valencia "
    "Naples"
)
COUNTRIES = _words(
    "Norway Germany France Spain Italy Portugal Austria Ireland Greece Egypt Japan Peru Ecuador Canada Australia "
    "India Korea Vietnam Kenya Nigeria Tunisia Switzerland Poland Latvia Estonia Finland Sweden Scotland Brazil Chile "
    "Mexico Cuba"
)
FIRST_NAMES = _words(
    "Anna Ben Mira Tom Lena Paul Ida Omar Nora Felix Yuki Sara Max Rosa Emil Clara Jonas Maya Leo Eva Hugo Lina Oscar "
    "Zoe Adam Elsa Ivan Greta Karl Alma Victor Stella Simon Vera Bruno Olga Anton Judith Martin Helen Robert Alice "
    "Peter Marta George Agnes Henry Irene Louis Sofia David Hanna Erik Laura Daniel Amina Tariq Priya Ravi Mei Chen "
    "Kofi Ama Diego Lucia"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
_BEGIN = _words("B Br C D F G Gr H J K Kl L M N P R S St T Tr V W Z Sch Th")
_MIDDLE = _words("a e i o u ei au ie oo ar er or al el")
_END = _words(
    "ll n nd r rt s ss t ck m lm ng nk tz x ff ller ner sen son berg mann man ski ton ley wood field stein ova ini"
)
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def surname(rng: Random) -> str:
    middle = rng.choice(_MIDDLE)
    if rng.random() < 0.4:
        middle += rng.choice("bdgklmnprstv") + rng.choice("aeiou")
    return rng.choice(_BEGIN) + middle + rng.choice(_END)


def full_name(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {surname(rng)}"


def made_word(rng: Random) -> str:
    """A word that nobody knows."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))


def code(rng: Random) -> str:
    """A code such as K7-204, QX31, 48213."""
    way = rng.randrange(4)
    if way == 0:
        return f"{rng.choice(LETTERS)}{rng.randint(1, 9)}-{rng.randint(100, 999)}"
    if way == 1:
        return f"{rng.choice(LETTERS)}{rng.choice(LETTERS)}{rng.randint(10, 99)}"
    if way == 2:
        return str(rng.randint(1000, 99999))
    return f"{rng.choice(LETTERS)}{rng.choice(LETTERS)}{rng.choice(LETTERS)}-{rng.randint(10, 999)}"


def path(rng: Random) -> str:
    """Of a file: docs/lamp.md."""
    folder = rng.choice(("", "src/", "docs/", f"/home/{rng.choice(NOUNS)}/"))
    return f"{folder}{rng.choice(NOUNS)}.{rng.choice(('txt', 'py', 'md', 'json', 'csv'))}"


def two_words(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def price(rng: Random) -> str:
    return f"{rng.randint(1, 99)}.{rng.randint(0, 99):02d}"


def date(rng: Random) -> str:
    """ISO: 2026-03-14."""
    return f"{rng.randint(2024, 2031)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

"""Word lists that names are drawn from: plain, lower-case, distinct English words."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


THINGS: tuple[str, ...] = _split(
    """
    acorn amber anchor apple arrow autumn badge bamboo banner barley barrel basket beacon
    birch bishop blanket blossom bonfire bottle branch breeze bridge bronze bucket butter
    cabin cactus candle canvas carbon castle cavern cedar cherry chestnut circle clover cobalt
    comet compass copper coral cottage cotton crystal daisy desert diamond dolphin dragon
    eagle ember engine falcon feather feldspar fern forest fossil fountain galaxy garden
    ginger glacier granite grape gravel hammer harbor hatchet hazel helmet heron hollow honey
    hurricane iceberg inkwell island ivory jacket jasmine jungle juniper kettle kingdom ladder
    lagoon lantern laurel lemon lighthouse lilac linen lizard lotus magnet mandolin mango
    maple marble meadow melon meteor mirror monsoon mosaic mountain nectar needle oasis ocean
    olive onyx orange orchid otter oyster palace panther paper pebble pepper phoenix pigeon
    pillow pine planet plum pocket pond prairie puzzle quartz rabbit raven ribbon river robin
    rocket saddle saffron salmon sapphire shadow silver spruce summit sunset thunder tiger
    timber topaz tulip tunnel turtle valley velvet violet walnut willow window winter
    """
)

FILES: tuple[str, ...] = _split(
    """
    agenda alpha archive audit backup basic beta budget cache catalog chapter chart client
    config contact copy counter daily data delta demo diary draft entry error event export
    extra final first form general grade guide history image import index info input invoice
    item journal label ledger letter level list local log main manual map market master memo
    menu message metric minutes model monthly names network note notes number office old order
    output page part plan policy poster price profile project queue quote readme recipe record
    report result review sales sample schedule score script second series session setup
    shopping signal simple sketch source stock story summary survey table target task team
    temp test text theme ticket todo total trace travel update user value version view weekly
    words work
    """
)

FOLDERS: tuple[str, ...] = _split(
    """
    archive assets backup books build cache cards charts code configs data docs drafts exports
    files games home images inbox items letters library logs maps media music notes old orders
    outbox pages papers photos plans posts public records reports results safe samples scripts
    shared sources stories tables tasks texts tools trash users videos web work
    """
)

TEXT_SUFFIXES: tuple[str, ...] = ("txt", "md", "csv", "log", "cfg")
SCRIPT_SUFFIXES: tuple[str, ...] = ("sh", "py")

PEOPLE: tuple[str, ...] = _split(
    """
    adele amir anton astrid beatriz bruno carla chen clara daniel diana elias emma erik farid
    felix fiona greta hana hugo ines ivan jana jonas julia karim lars leila lena lucas maria
    marta mina nadia nils nora oscar paula petra pierre rosa samir sara simon sofia tomas ursula
    vera viktor wanda yara yusuf
    """
)

CITIES: tuple[str, ...] = _split(
    """
    athens bergen berlin bilbao bologna bremen cairo cork dakar dresden dublin geneva ghent
    glasgow hanoi helsinki izmir kyoto lagos leeds lima lisbon lyon malmo milan nairobi nantes
    osaka oslo padua porto prague quito riga rome seville sofia tallinn tampere trieste tunis
    turin utrecht valencia vienna vilnius warsaw zagreb zurich
    """
)

# How an instruction says that its inputs stay; each is checked.
KEEP: tuple[str, ...] = (
    "Leave everything that is already there exactly as it is.",
    "Don't modify the files that were given to you.",
    "The existing files must stay unchanged.",
    "Nothing else in the directory may be altered or removed.",
)

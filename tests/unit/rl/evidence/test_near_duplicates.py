"""Held-out tasks that repeat a training task are found; tasks of one template are not."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config_file import load_config
from rl.evidence.near_duplicates import THRESHOLD, near_duplicates, similarity
from rl.prepare import PreparedTasks, prepare_tasks
from rl.records import TaskRef
from tests.unit.rl.evidence import document

LONG_WORDS = 40  # what the document calls a long instruction


def task(instruction: str, name: str = "", family: str = "") -> TaskRef:
    digest = hashlib.sha256(f"{name}{instruction}".encode()).hexdigest()
    name = name or digest[:8]
    return TaskRef(name=name, digest=digest, path=name, family=family, instruction=instruction)


def copy_of(original: TaskRef, instruction: str) -> TaskRef:
    """A package of another name and content, in the same family."""
    return task(instruction, f"{original.family}-copy", original.family)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedTasks]:
    root = tmp_path_factory.mktemp("state")
    return {
        name: prepare_tasks(load_config(Path(f"configs/{name}.toml")).tasks, root / name)
        for name in ("final", "local")
    }


@pytest.fixture(scope="module")
def long_tasks(splits: dict[str, PreparedTasks]) -> list[TaskRef]:
    tasks = [*splits["final"].train, *splits["final"].heldout]
    return [t for t in tasks if len(re.findall(r"\w+", t.instruction)) >= LONG_WORDS]


# --- similarity --------------------------------------------------------------

TEXT = "Count the words of notes.txt and write the number to count.txt."


@pytest.mark.parametrize(
    "same",
    [
        TEXT.upper(),
        TEXT.replace(" ", "\n\t  "),
        TEXT.replace(".txt", ". TXT;").replace("and", "-- and,"),
        "\N{FULLWIDTH LATIN CAPITAL LETTER C}" + TEXT[1:],
        TEXT.replace("words", "wo\u00adrds").replace("notes", "no\u200btes"),
    ],
)
def test_case_space_punctuation_and_unicode_forms_do_not_matter(same: str) -> None:
    assert similarity(TEXT, same) == 1.0


def test_similarity_is_the_share_of_word_pairs() -> None:
    assert similarity("a b c", "a b d") == 2 / 6  # start-a, a-b; b-c, c-end, b-d, d-end
    assert similarity("a a a", "a a") == 3 / 4  # start-a, a-a, a-end; one a-a more
    assert similarity("a b", "c d") == 0.0
    assert similarity("", "?!") == 1.0
    assert similarity("移动文件", "移动目录") == 2 / 8


texts = st.lists(st.sampled_from("abcde"), max_size=9).map(" ".join)


@given(a=texts, b=texts)
def test_similarity_is_symmetric_and_within_bounds(a: str, b: str) -> None:
    assert 0 <= similarity(a, b) == similarity(b, a) <= 1
    assert similarity(a, a) == 1


@settings(max_examples=100, deadline=None)
@given(
    train=st.lists(texts, max_size=8),
    heldout=st.lists(texts, max_size=8),
    threshold=st.sampled_from([0.2, 1 / 3, 0.5, 0.6, 0.7, 1.0]),
)
def test_no_pair_above_the_threshold_is_missed(
    train: list[str], heldout: list[str], threshold: float
) -> None:
    trained = [task(text, f"t{n}") for n, text in enumerate(train)]
    held = [task(text, f"h{n}") for n, text in enumerate(heldout)]
    found = near_duplicates(trained, held, threshold)
    compared = [(h, t, similarity(h.instruction, t.instruction)) for h in held for t in trained]
    assert {(d.heldout.name, d.train.name, d.similarity) for d in found} == {
        (h.name, t.name, alike) for h, t, alike in compared if alike >= threshold
    }
    assert [d.similarity for d in found] == sorted((d.similarity for d in found), reverse=True)


@pytest.mark.parametrize("threshold", [0.0, 1.1, float("nan")])
def test_a_threshold_without_meaning_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        near_duplicates([], [], threshold)


def test_one_copy_is_found_among_hundreds_of_tasks_of_a_template() -> None:
    draws = random.Random(0)
    template = [f"word{n}" for n in range(150)]

    def instruction() -> str:
        words = list(template)
        for at in draws.sample(range(150), 30):
            words[at] = f"name{draws.randrange(500)}"
        return " ".join(words)

    trained = [task(instruction(), f"t{n}") for n in range(900)]
    held = [task(instruction(), f"h{n}") for n in range(299)]
    held.append(task(trained[7].instruction + " Thank you.", "copy"))
    assert [(d.heldout.name, d.train.name) for d in near_duplicates(trained, held)] == [
        ("copy", "t7")
    ]


# --- what is told apart by name ----------------------------------------------

LINES = (
    "Go through {} and, in every text file there, at any depth, delete the lines that begin with "
    "a hash. Keep the order of all other lines, change no other file, and don't add anything."
)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("logs/old", "logs/new"),
        ("`inbox`", "`outbox`"),
        ("[inbox]", "[outbox]"),
        ("'inbox'", "'outbox'"),
        ('"the inbox"', '"the outbox"'),
        ("the 3 newest folders", "the 5 newest folders"),
        ("directory inbox;", "directory outbox;"),
        ("what is called inbox", "what is called outbox"),
        ("INBOX", "OUTBOX"),
        (".config", ".cache"),
        ("/srv", "/opt"),
        ("my_files", "our_files"),
    ],
)
def test_tasks_of_one_family_that_name_different_things_are_no_copies(a: str, b: str) -> None:
    first, second = task(LINES.format(a), "x", "clean"), task(LINES.format(b), "y", "clean")
    assert similarity(first.instruction, second.instruction) >= THRESHOLD
    assert near_duplicates([first], [second]) == []


def test_words_of_the_packages_names_tell_a_family_apart() -> None:
    first, second = (task(LINES.format(x), f"clean-{x}", "clean") for x in ("inbox", "outbox"))
    assert near_duplicates([first], [second]) == []
    renamed = task(second.instruction, "clean-1", "clean")
    assert near_duplicates([first], [renamed]) != []


def test_names_excuse_nobody_outside_a_declared_family() -> None:
    for families in (("", ""), ("clean", ""), ("clean", "tidy")):
        first, second = (
            task(LINES.format(x), x, family)
            for x, family in zip(("logs/old", "logs/new"), families, strict=True)
        )
        assert len(near_duplicates([first], [second])) == 1


def test_one_text_that_names_more_than_the_other_is_a_copy() -> None:
    first = task(LINES.format("logs/old"), "x", "clean")
    longer = task(f"{first.instruction} Finish within 10 minutes.", "y", "clean")
    assert len(near_duplicates([first], [longer])) == 1
    assert len(near_duplicates([longer], [first])) == 1


def test_equal_texts_are_copies_whatever_their_names() -> None:
    first, second = (task(LINES.format("logs/old"), name, "clean") for name in ("old", "logs"))
    assert [d.similarity for d in near_duplicates([first], [second])] == [1.0]


# --- the bank and the shipped splits -----------------------------------------


def highest(split: PreparedTasks, *, families: bool) -> list[float]:
    """Of each held-out task, the highest similarity to a training task of another family or any."""
    return [
        max(
            similarity(held.instruction, trained.instruction)
            for trained in split.train
            if not families or trained.family != held.family
        )
        for held in split.heldout
    ]


def test_the_shipped_splits_are_as_the_document_says(splits: dict[str, PreparedTasks]) -> None:
    rows = []
    for name, split in splits.items():
        best, apart = highest(split, families=False), highest(split, families=True)
        rows.append(
            [
                f"`configs/{name}.toml`",
                f"{len(split.train)}",
                f"{len(split.heldout)}",
                f"{median(best):.2f}",
                f"{max(best):.2f}",
                f"{max(apart):.2f}",
                f"{sum(alike >= THRESHOLD for alike in best)}",
                f"{len(near_duplicates(split.train, split.heldout))}",
            ]
        )
    assert document.table("What was measured") == rows
    assert f"similarity of at least {THRESHOLD}" in document.TEXT


def test_no_two_tasks_of_a_large_bank_are_taken_for_copies() -> None:
    from sandboxes.bank.families import FAMILIES, draw_package

    seen: set[str] = set()
    packages = [
        draw_package(family, 5, turn, turn, seen)
        for turn in range(30)
        for family in FAMILIES.values()
    ]
    tasks = [task(package.instruction, package.name, package.family) for package in packages]
    half = len(tasks) // 2
    assert near_duplicates(tasks[:half], tasks[half:]) == []
    orphans = [of.model_copy(update={"family": ""}) for of in tasks]
    assert len(near_duplicates(orphans[:half], orphans[half:])) > 100


# --- edits of a copied instruction -------------------------------------------


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.;:!?])\s+", text)


def replaced(text: str, count: int) -> str:
    """The text with other words, spread over it, in place of some that name nothing."""
    unquoted = re.sub(r"`[^`]*`|\"[^\"]*\"", lambda match: "#" * len(match[0]), text)
    plain = [*re.finditer(r"(?<!named )(?<!called )(?<!\S)[a-z]+(?!\S)", unquoted)]
    for n in reversed(range(count)):
        start, end = plain[(n + 1) * len(plain) // (count + 1)].span()
        text = f"{text[:start]}other{'abc'[n]}{text[end:]}"
    return text


EDITS: dict[str, Callable[[str], str]] = {
    "upper case": str.upper,
    "a line for each word": lambda text: text.replace(" ", "\n\n"),
    "punctuation at the ends of words left out": lambda text: re.sub(
        r"(?<!\w)[,.;:`\"()]+|[,.;:`\"()]+(?!\w)", "", text
    ),
    "a sentence of 8 words added": lambda text: f"{text} Do not ask any questions; just do it.",
    "2 words replaced": lambda text: replaced(text, 2),
    "3 words replaced": lambda text: replaced(text, 3),
    "all sentences in reverse order": lambda text: " ".join(reversed(sentences(text))),
}


def test_edited_copies_are_found_and_as_similar_as_the_document_says(
    long_tasks: list[TaskRef],
) -> None:
    rows = []
    for name, edit in EDITS.items():
        least = 1.0
        for original in long_tasks:
            copied = copy_of(original, edit(original.instruction))
            found = near_duplicates([original], [copied])
            assert found, (name, original.instruction)
            least = min(least, found[0].similarity)
        rows.append([name, f"{least:.2f}"])
    assert document.table("Edits") == rows
    assert f"{len(long_tasks)} instructions of {LONG_WORDS} words or more" in document.TEXT


# Each: how an instruction of the cohort begins, and what someone made of all of it.
HAND_MADE = [
    (
        "Some files below maps (subdirectories included) are byte-for-byte copies",
        "Several files below maps (subdirectories included) are byte-for-byte copies of one "
        "another. Of each set of identical files, retain only the one whose path comes first in "
        "byte order, and delete the rest. Files without a copy stay untouched.",
    ),
    (
        "The commit \"Change all defaults\"",
        "THE COMMIT 'Change all defaults' in the git repo glacier turned out to be a mistake!\n\n"
        "- Undo exactly what it changed, in one new commit on main\n"
        "- keep everything that was committed after it\n"
        "- don't rewrite history\n- the working tree must match the new commit",
    ),
    (
        "rocket holds one directory per release",
        "Please note: rocket holds one directory per release, named by its version. Remove all "
        "but the two latest releases (versions compare number by number, so 1.10.0 is newer than "
        "1.9.0), and make rocket/current a symlink to the newest, with a relative target (just "
        "the version). A broken link of that name may already be there.",
    ),
    (
        "Import summary.csv (CSV with the header id,name,city)",
        "Python's sqlite3 module is there; a sqlite3 program may not be. Import summary.csv (CSV "
        "with the header id, name, city) into the table customers of the SQLite database "
        "mirror.db: a customer whose id is already present is updated with the row's name and "
        "city, any other is inserted. Customers that summary.csv does not mention, and the table "
        "orders, remain as they are, and so does summary.csv.",
    ),
    (
        "Normalise the line ends of the files in music/",
        "Normalize the line endings of the files in music/, which mix Unix and DOS ones: every "
        ".bat file must end its lines with CR LF, and all other files with LF alone. Where a file "
        "starts with a UTF-8 byte order mark, remove the mark. Apart from that no byte may "
        "change, and no files may be added to music/. Be careful.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("beginning", "copied"), HAND_MADE)
def test_hand_made_copies_of_real_instructions_are_found(
    splits: dict[str, PreparedTasks], beginning: str, copied: str
) -> None:
    tasks = [*splits["final"].train, *splits["final"].heldout]
    (original,) = [t for t in tasks if t.instruction.startswith(beginning)]
    found = near_duplicates(tasks, [copy_of(original, copied)])
    assert [d.train.name for d in found] == [original.name]

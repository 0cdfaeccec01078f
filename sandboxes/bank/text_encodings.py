"""Tier 3, text encodings: conversions, and repairs of what went wrong in one."""

from __future__ import annotations

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import names, text, unchanged
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import FOLDERS, KEEP, THINGS

# Words that Latin-1 and UTF-8 write differently.
ACCENTED = (
    "café",
    "naïve",
    "über",
    "señor",
    "crème",
    "Ångström",
    "façade",
    "jalapeño",
    "Zoë",
    "déjà",
)


def _encoding(draw: Draw) -> Task:
    """One of four repairs of text in mixed encodings."""
    return draw.variant((_to_utf8, _invalid, _mojibake, _line_ends, _to_utf8))(draw)


def _prose(draw: Draw) -> str:
    lines = [
        f"{draw.choice(ACCENTED)} {draw.choice(THINGS)} {draw.choice(ACCENTED)}"
        for _ in range(draw.number(2, 5))
    ]
    return "\n".join(lines) + "\n"


def _to_utf8(draw: Draw) -> Task:
    root = draw.pick(FOLDERS)
    listing = draw.file(("csv",))
    kinds = ("iso-8859-1", "utf-16", "utf-8", "utf-8-sig", "cp437", "iso-8859-1", "utf-16-le")
    stems = draw.picks(THINGS, len(kinds))
    after = {f"{root}/{stem}.txt": _prose(draw) for stem in stems}
    before = {
        path: content.encode("utf-16-le" if kind == "utf-16" else kind)
        for (path, content), kind in zip(after.items(), kinds, strict=True)
    }
    before = {
        path: b"\xff\xfe" + data if kind == "utf-16" else data
        for (path, data), kind in zip(before.items(), kinds, strict=True)
    }
    table = "".join(
        f"{path},{kind}\n" for path, kind in draw.shuffled(list(zip(after, kinds, strict=True)))
    )
    return Task(
        label=f"utf8 {stems[0]}",
        instruction=f"The files in {root}/ are in different encodings; {listing} says which (path, "
        "encoding, by Python's names; utf-8-sig is UTF-8 with a byte order mark). Convert every "
        "one in place to UTF-8 without a byte order mark, with exactly the same characters. Add "
        f"no files to {root}/, and leave {listing} as it is.",
        files={**before, listing: "path,encoding\n" + table},
        solution=f"""
python3 - <<'END'
import csv, pathlib
for row in csv.DictReader(open("{listing}", newline="")):
    path = pathlib.Path(row["path"])
    path.write_bytes(path.read_bytes().decode(row["encoding"]).encode("utf-8"))
END
""",
        expect=(
            names(root, [path.removeprefix(f"{root}/") for path in after]),
            *(unchanged(path, content) for path, content in after.items()),
        ),
        changes=tuple(path for path in after if before[path] != after[path].encode()),
    )


def _invalid(draw: Draw) -> Task:
    root = draw.pick(FOLDERS)
    out = draw.file(("txt",))
    stems = draw.picks(THINGS, 9)
    files = {f"{root}/{stem}.txt": _prose(draw).encode() for stem in stems}
    bad: dict[str, int] = {}
    for path in draw.shuffled(sorted(files))[:4]:
        lines = files[path].decode().splitlines()
        at = draw.number(0, len(lines) - 1)
        data = [line.encode() for line in lines]
        data[at] = lines[at].encode("iso-8859-1")
        files[path] = b"\n".join(data) + b"\n"
        bad[path] = at + 1
    return Task(
        label=f"invalid {stems[0]}",
        instruction=f"Some files in {root}/ are not valid UTF-8 throughout. For each of those "
        f"write a line `PATH:LINE` to {out}, where LINE is the number of the first line (from 1) "
        f"that can't be decoded, and PATH is like {root}/{stems[0]}.txt. Sort the lines by path in "
        f"byte order. {draw.choice(KEEP)}",
        files=files,
        solution=f"""
python3 - <<'END' > {out}
import pathlib
for path in sorted(pathlib.Path("{root}").iterdir()):
    for number, line in enumerate(path.read_bytes().split(b"\\n"), 1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            print(f"{{path}}:{{number}}")
            break
END
""",
        expect=(text(out, "\n".join(f"{path}:{bad[path]}" for path in sorted(bad))),),
    )


def _mojibake(draw: Draw) -> Task:
    root = draw.pick(FOLDERS)
    stems = draw.picks(THINGS, 6)
    after = {f"{root}/{stem}.txt": _prose(draw) for stem in stems}
    twice = [path for at, path in enumerate(after) if at % 2]
    before = {
        path: content.encode().decode("iso-8859-1") if path in twice else content
        for path, content in after.items()
    }
    return Task(
        label=f"mojibake {stems[0]}",
        instruction=f"Somebody read some of the UTF-8 files in {root}/ as ISO-8859-1 (Latin-1) and "
        "saved them as UTF-8 again, so that for example é became Ã©. Repair those files in place. "
        f"The others are fine: leave them exactly as they are, and add no files to {root}/.",
        files=before,
        solution=f"""
python3 - <<'END'
import pathlib
for path in pathlib.Path("{root}").iterdir():
    try:
        fixed = path.read_bytes().decode("utf-8").encode("iso-8859-1")
        fixed.decode("utf-8")
    except UnicodeError:
        continue
    path.write_bytes(fixed)
END
""",
        expect=(
            names(root, [path.removeprefix(f"{root}/") for path in after]),
            *(unchanged(path, content) for path, content in after.items()),
        ),
        changes=tuple(twice),
    )


def _line_ends(draw: Draw) -> Task:
    root = draw.pick(FOLDERS)
    stems = draw.picks(THINGS, 7)
    suffixes = ("txt", "csv", "bat")
    plain = {f"{root}/{stem}.{suffixes[at % 3]}": _prose(draw) for at, stem in enumerate(stems)}
    before = {
        path: content.replace("\n", "\r\n") if at % 2 or at == 2 else content
        for at, (path, content) in enumerate(plain.items())
    }
    marked = next(iter(before))
    before[marked] = "\ufeff" + before[marked]
    after = {
        path: content.replace("\n", "\r\n") if path.endswith(".bat") else content
        for path, content in plain.items()
    }
    return Task(
        label=f"lines {stems[0]}",
        instruction=f"Normalise the line ends of the files in {root}/, which mix Unix and DOS "
        "ones: every .bat file must end its lines with CR LF, and all other files with LF alone. "
        "Where a file begins with a UTF-8 byte order mark, remove the mark. Apart from that no "
        f"byte may change, and no files may be added to {root}/.",
        files=before,
        solution=f"""
for f in {root}/*; do
  sed -i -e '1s/^\\xef\\xbb\\xbf//' -e 's/\\r$//' "$f"
  case "$f" in *.bat) sed -i 's/$/\\r/' "$f" ;; esac
done
""",
        expect=(
            names(root, [path.removeprefix(f"{root}/") for path in after]),
            *(unchanged(path, content) for path, content in after.items()),
        ),
        changes=tuple(plain),
    )


BUILDERS: dict[str, Builder] = {"encoding": _encoding}

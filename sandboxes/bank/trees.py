"""Tier 2, edits of files and of trees of files: editing, renaming, collecting, checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import Expectation, absent, folder, names, text, unchanged
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import FILES, FOLDERS, KEEP, THINGS


def _edit(draw: Draw) -> Task:
    """Change a setting in one section, comment one out, drop one, add one."""
    name = draw.file(("ini", "conf"))
    sections, keys = draw.picks(FOLDERS, 3), draw.picks(THINGS, 5)
    values = {(part, key): draw.number(10, 999) for part in sections for key in keys}
    target = draw.choice(sections)
    changed, quiet, gone = draw.shuffled(keys)[:3]
    new_value = draw.number(1000, 9999)
    steps = {
        "set": (
            f"set {changed} to {new_value} in the section [{target}]",
            f"/^\\[{target}\\]/,/^$/ s/^{changed} = .*/{changed} = {new_value}/",
        ),
        "quiet": (
            f"comment out {quiet} in [{target}] by putting `# ` (a hash and a space) before it",
            f"/^\\[{target}\\]/,/^$/ s/^{quiet} = /# &/",
        ),
        "drop": (f"delete the line of {gone} from every section", f"/^{gone} = /d"),
    }
    chosen = draw.shuffled(list(steps))[: draw.variant((3, 2, 3))]

    def line(part: str, key: str) -> list[str]:
        plain = f"{key} = {values[part, key]}"
        if key == gone and "drop" in chosen:
            return []
        if part == target and key == changed and "set" in chosen:
            return [f"{key} = {new_value}"]
        if part == target and key == quiet and "quiet" in chosen:
            return [f"# {plain}"]
        return [plain]

    def document(lines: Callable[[str, str], list[str]]) -> str:
        blocks = [
            "\n".join([f"[{part}]", *(row for key in keys for row in lines(part, key))])
            for part in sections
        ]
        return f"; settings of {name}\n" + "\n\n".join(blocks) + "\n"

    tasks = [steps[step][0] for step in chosen]
    ask = draw.variant(
        (
            f"In {name}, please " + "; ".join(tasks) + ".",
            f"Edit the configuration file {name}: " + ", and ".join(tasks) + ".",
            f"{name} needs a few changes: " + "; then ".join(tasks) + ".",
        )
    )
    commands = " ".join(f"-e '{steps[step][1]}'" for step in chosen)
    after = document(line)
    return Task(
        label=name,
        instruction=f"{ask} Every other line, comments, blank lines and the order included, must "
        "stay as it is.",
        files={
            name: document(lambda part, key: [f"{key} = {values[part, key]}"]),
            **draw.bystanders(),
        },
        solution=f"sed -i {commands} {name}",
        expect=(unchanged(name, after),),
        changes=(name,),
    )


def _tree(draw: Draw, root: str, stems: list[str], suffixes: tuple[str, ...]) -> dict[str, str]:
    """Files in nested folders below `root`, all stems distinct."""
    top = draw.picks(FOLDERS, 3)
    places = [root, f"{root}/{top[0]}", f"{root}/{top[1]}", f"{root}/{top[1]}/{top[2]}"]
    return {
        f"{places[at % 4]}/{stem}.{suffixes[at % len(suffixes)]}": draw.content()
        for at, stem in enumerate(stems)
    }


def _moved(tree: dict[str, str], renamed: dict[str, str]) -> tuple[Expectation, ...]:
    """A tree whose files have new names and the same content."""
    after = {renamed.get(path, path): content for path, content in tree.items()}
    root = next(iter(tree)).split("/")[0]
    return (
        names(root, [path.removeprefix(f"{root}/") for path in after]),
        *(unchanged(path, content) for path, content in after.items()),
    )


def _rename(draw: Draw) -> Task:
    """Rename many files below a folder by one rule."""
    root = draw.pick(FOLDERS)
    stems = draw.picks(THINGS, 9)
    kind = draw.variant(("suffix", "case", "spaces", "prefix"))
    if kind == "suffix":
        old, new = draw.variant((("jpeg", "jpg"), ("htm", "html"), ("text", "txt")))
        tree = _tree(draw, root, [*stems, f"{stems[0]}.{old}"], (old, "dat", old, old))
        tree[f"{root}/{old}.notes"] = draw.content()
        renamed = {path: path.removesuffix(old) + new for path in tree if path.endswith(f".{old}")}
        rule = f"give every file whose name ends in .{old} the ending .{new} instead"
        move = f'mv "$f" "${{f%.{old}}}.{new}"'
        find = f"-name '*.{old}'"
    elif kind == "case":
        mixed = [stem.capitalize() if at % 3 else stem.upper() for at, stem in enumerate(stems)]
        tree = _tree(draw, root, mixed, ("TXT", "md", "Csv"))
        renamed = {path: _in_place(path, str.lower) for path in tree}
        rule = "change the names of all files to lower case (folder names stay)"
        move = 'b="$(basename "$f")"; mv "$f" "$(dirname "$f")/${b,,}"'
        find = "-name '*[A-Z]*'"
    elif kind == "spaces":
        spaced = [f"{a} {b}" for a, b in zip(stems, [*stems[1:], "draft two"], strict=True)]
        tree = _tree(draw, root, spaced, ("txt", "md"))
        renamed = {path: _in_place(path, lambda base: base.replace(" ", "_")) for path in tree}
        rule = "replace every space in a file name by an underscore"
        move = 'b="$(basename "$f")"; mv "$f" "$(dirname "$f")/${b// /_}"'
        find = "-name '* *'"
    else:
        tree = _tree(draw, root, stems, ("log", "txt", "log"))
        year = draw.number(2015, 2024)
        renamed = {
            path: _in_place(path, lambda base: f"{year}-{base}")
            for path in tree
            if path.endswith(".log")
        }
        rule = f"put {year}- in front of the name of every .log file"
        move = f'mv "$f" "$(dirname "$f")/{year}-$(basename "$f")"'
        find = "-name '*.log'"
    ask = draw.variant(
        (
            f"Below the directory {root}, at any depth, {rule}.",
            f"Please tidy up {root}: {rule}, in all its subdirectories too.",
            f"Go through {root} recursively and {rule}.",
        )
    )
    return Task(
        label=f"{root} {kind}",
        instruction=f"{ask} Files stay in their folders, their content stays the same, and "
        "nothing is lost or added.",
        files={**tree, **draw.bystanders()},
        solution=f"find {root} -type f {find} -print0 | while IFS= read -r -d '' f; do {move}; "
        "done",
        expect=_moved(tree, renamed),
        changes=tuple(tree),
    )


def _in_place(path: str, change: Callable[[str], str]) -> str:
    where, _, base = path.rpartition("/")
    return f"{where}/{change(base)}"


def _collect(draw: Draw) -> Task:
    """Copy, move or delete what a condition picks out of a tree."""
    root, target = draw.picks(FOLDERS, 2)
    stems = draw.picks(FILES, 12)
    tree = _tree(draw, root, stems, ("txt", "md", "cfg"))
    word = draw.choice(next(iter(tree.values())).split())
    big = {path: content * 40 for path, content in list(tree.items())[::4]}
    limit = 500
    base = {path: path.rpartition("/")[2] for path in tree}
    kind = draw.variant(("copy", "move", "delete", "empty"))
    after: dict[str, str] = {}
    if kind == "copy":
        picked = [path for path, content in tree.items() if word in content.split()]
        ask = f"copy every file below {root} that contains the word {word} into a new directory "
        ask += f"{target}, all side by side without subdirectories"
        command = f"mkdir {target}; grep -rlZw {word} {root} | xargs -0 cp -t {target}"
        left, extra = tree, {f"{target}/{base[path]}": tree[path] for path in picked}
    elif kind == "move":
        tree |= big
        picked = [path for path, content in tree.items() if len(content) > limit]
        ask = f"move all files below {root} that are larger than {limit} bytes into a new "
        ask += f"directory {target}, flat"
        command = f"mkdir {target}; find {root} -type f -size +{limit}c -exec mv -t {target} {{}} +"
        extra = {f"{target}/{base[path]}": tree[path] for path in picked}
        left = {path: content for path, content in tree.items() if path not in picked}
    elif kind == "delete":
        keep = [path for path in tree if path.count("/") == 1]
        ask = f"delete every .cfg file in the subdirectories of {root}, at any depth, but none of "
        ask += f"those that lie directly in {root}"
        command = f"find {root} -mindepth 2 -type f -name '*.cfg' -delete"
        left = {p: c for p, c in tree.items() if p in keep or not p.endswith(".cfg")}
        extra = {}
    else:
        tree |= dict.fromkeys(list(tree)[::3], "")
        ask = f"remove the empty files below {root}, and write the paths of those you removed to "
        ask += f"{target}.txt, relative to the working directory (like {root}/x.txt), one per "
        ask += "line, sorted in byte order"
        command = f"find {root} -type f -empty -print -delete | LC_ALL=C sort > {target}.txt"
        left, extra = {path: content for path, content in tree.items() if content}, {}
        gone = sorted(path for path in tree if path not in left)
        after[f"{target}.txt"] = "\n".join(gone)
    lead = draw.variant(("Please", "Tidy up:", "I would like you to", "Your task:"))
    results = [names(root, [path.removeprefix(f"{root}/") for path in left])]
    results += [unchanged(path, content) for path, content in {**left, **extra}.items()]
    results += [text(path, content) for path, content in after.items()]
    if extra:
        results.append(names(target, [path.removeprefix(f"{target}/") for path in extra]))
    return Task(
        label=f"{root} {kind}",
        instruction=f"{lead} {ask}. All other files, and the directories, stay as they are.",
        files={**tree, **draw.bystanders()},
        solution=command,
        expect=tuple(results),
        changes=tuple(tree),
    )


def _sums(draw: Draw) -> Task:
    """Make a manifest of checksums, verify one, or find duplicates by content."""
    root, out = draw.pick(FOLDERS), draw.file(("txt",))
    stems = draw.picks(THINGS, 10)
    tree = _tree(draw, root, stems, ("bin", "txt", "dat"))
    tree = {path: f"{path}\n{content}" for path, content in tree.items()}
    ordered = sorted(tree)
    kind = draw.variant(("make", "verify", "duplicates"))
    if kind == "make":
        tool = draw.choice(("sha256", "md5", "sha1"))
        lines = [f"{hashlib.new(tool, tree[p].encode()).hexdigest()}  {p}" for p in ordered]
        instruction = (
            f"Write a checksum manifest of all files below {root} (at any depth) to {out}, in "
            f"the format of {tool}sum: digest, two spaces, path. Paths are relative to the "
            f"working directory, like {ordered[0]}, and the lines are sorted by path in byte order."
        )
        command = f"find {root} -type f -print0 | LC_ALL=C sort -z | xargs -0 {tool}sum > {out}"
        return Task(
            label=f"{root} {kind}",
            instruction=f"{instruction} {draw.choice(KEEP)}",
            files=tree,
            solution=command,
            expect=(text(out, "\n".join(lines)),),
        )
    if kind == "verify":
        listed = {
            path: hashlib.sha256(content.encode()).hexdigest() for path, content in tree.items()
        }
        bad = draw.shuffled(ordered)[:4]
        present = {p: (c + "?" if p in bad[:2] else c) for p, c in tree.items() if p not in bad[2:]}
        lines = [f"{'changed' if p in bad[:2] else 'missing'} {p}" for p in sorted(bad)]
        manifest = "".join(f"{listed[p]}  {p}\n" for p in draw.shuffled(ordered))
        return Task(
            label=f"{root} {kind}",
            instruction=f"SHA256SUMS holds the checksums of what should be below {root}. Compare "
            "the files with it. For every listed file that is not as it should be, write a line "
            f"to {out}: `changed PATH` if its content differs, `missing PATH` if it is not there. "
            f"Paths as in SHA256SUMS, lines ordered by path in byte order. {draw.choice(KEEP)}",
            files={**present, "SHA256SUMS": manifest},
            solution=f"""
sort -k2 SHA256SUMS | while read -r sum path; do
  if [ ! -e "$path" ]; then echo "missing $path"
  elif [ "$(sha256sum < "$path" | cut -d' ' -f1)" != "$sum" ]; then echo "changed $path"; fi
done | LC_ALL=C sort -k2 > {out}
""",
            expect=(text(out, "\n".join(lines)),),
        )
    copies = {f"{root}/copy-of-{path.rpartition('/')[2]}": tree[path] for path in ordered[:4]}
    tree |= copies
    first: dict[str, str] = {}
    for path in sorted(tree):
        first.setdefault(tree[path], path)
    left = {path: content for content, path in first.items()}
    return Task(
        label=f"{root} {kind}",
        instruction=f"Some files below {root} (subdirectories included) are byte-for-byte copies "
        "of each other. Of each set of identical files keep only the one whose path comes first "
        "in byte order, and delete the rest. Files without a copy stay untouched.",
        files={**tree, **draw.bystanders()},
        solution=f"""
declare -A seen
while IFS= read -r -d '' path; do
  sum="$(sha256sum < "$path")"
  if [ -n "${{seen[$sum]:-}}" ]; then rm "$path"; else seen[$sum]=1; fi
done < <(find {root} -type f -print0 | LC_ALL=C sort -z)
""",
        expect=(
            names(root, [path.removeprefix(f"{root}/") for path in left]),
            *(unchanged(path, content) for path, content in left.items()),
            *(absent(path) for path in tree if path not in left),
            folder(root),
        ),
        changes=tuple(tree),
    )


BUILDERS: dict[str, Builder] = {
    "edit": _edit,
    "rename": _rename,
    "collect": _collect,
    "sums": _sums,
}

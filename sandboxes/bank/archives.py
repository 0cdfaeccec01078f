"""Tier 3, archives and permissions."""

from __future__ import annotations

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import (
    Expectation,
    absent,
    folder,
    link,
    members,
    mode,
    names,
    text,
    unchanged,
)
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import FILES, FOLDERS, KEEP, THINGS


def _archive(draw: Draw) -> Task:
    """One of five jobs on tar archives that the set-up makes."""
    return draw.variant((_nested, _repack, _newer, _damaged, _strip))(draw)


def _contents(draw: Draw, count: int, suffixes: tuple[str, ...] = ("txt", "md")) -> dict[str, str]:
    """Files in up to one folder each, all names distinct."""
    places = ["", f"{draw.pick(FOLDERS)}/", f"{draw.pick(FOLDERS)}/"]
    return {
        f"{places[at % 3]}{stem}.{suffixes[at % len(suffixes)]}": draw.content() * draw.number(1, 4)
        for at, stem in enumerate(draw.picks(FILES, count))
    }


def _under(root: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{root}/{name}": content for name, content in files.items()}


def _nested(draw: Draw) -> Task:
    """A file in an archive in an archive."""
    outer = f"{draw.pick(THINGS)}.tar.gz"
    parts = draw.picks(THINGS, 3)
    inner = {part: _contents(draw, 4) for part in parts}
    chosen = draw.choice(parts)
    wanted = draw.choice(sorted(inner[chosen]))
    base, out = wanted.rpartition("/")[2], draw.file(("copy",))
    given = {
        f"{part}/{name}": text for part, files in inner.items() for name, text in files.items()
    }
    packing = "\n".join(f"tar -C {part} -cf {part}.tar . && rm -r {part}" for part in parts)
    tars = " ".join(f"{part}.tar" for part in parts)
    return Task(
        label=f"nested {parts[0]}",
        instruction=f"{outer} contains several tar archives, and one of them contains a file "
        f"named {base}. Write that file's content to {out} in the current directory. Don't leave "
        f"anything else behind there: at the end it holds {outer} and {out} only.",
        files=given,
        setup=f"{packing}\ntar -czf {outer} {tars} && rm {tars}",
        solution=f"""
work=$(mktemp -d)
tar -xzf {outer} -C "$work"
for part in "$work"/*.tar; do tar -xf "$part" -C "$work"; done
find "$work" -name '{base}' -exec cp {{}} {out} \\;
rm -r "$work"
tar -tzf {outer} > /dev/null
""",
        expect=(unchanged(out, inner[chosen][wanted]), names(".", [outer, out])),
        changes=tuple(given),
    )


def _repack(draw: Draw) -> Task:
    """Make an archive of a folder without some of it."""
    root, top = draw.picks(THINGS, 2)
    files = _contents(draw, 9, ("txt", "log", "md"))
    files |= {"cache/a.txt": draw.content(), "cache/deep/b.txt": draw.content()}
    packed = {
        f"{top}/{name}": content
        for name, content in files.items()
        if not name.endswith(".log") and not name.startswith("cache/")
    }
    return Task(
        label=f"repack {root}",
        instruction=f"Pack the directory {root} as {top}.tar.gz (a gzipped tar archive) in the "
        f"current directory. Inside it, everything lies below a single top folder named {top} "
        f"instead of {root}. Leave out all .log files and everything in {root}/cache. "
        f"{draw.choice(KEEP)}",
        files=_under(root, files),
        solution=f"""
tar -czf {top}.tar.gz --exclude='*.log' --exclude='{root}/cache' \\
  --transform 's,^{root},{top},' {root}
""",
        expect=(members(f"{top}.tar.gz", packed),),
    )


def _newer(draw: Draw) -> Task:
    """What differs between two archives."""
    old, new = (f"{word}.tar.gz" for word in draw.picks(THINGS, 2))
    out = draw.file(("txt",))
    before = _contents(draw, 9)
    ordered = draw.shuffled(sorted(before))
    after = {name: content for name, content in before.items() if name not in ordered[:2]}
    after[ordered[3]] += draw.content()
    after[ordered[4]] = after[ordered[4]].upper()
    added = {f"{name.removesuffix('.md')}-more.txt": draw.content() for name in ordered[5:7]}
    after |= added
    lines = [f"removed {name}" for name in ordered[:2]]
    lines += [f"changed {name}" for name in ordered[3:5]]
    lines += [f"added {name}" for name in added]
    return Task(
        label=f"compare {old}",
        instruction=f"{old} and {new} are two releases of the same files. Write to {out} one line "
        "per file that differs: `added PATH`, `removed PATH` or `changed PATH`, where changed "
        "means other content. PATH is the file's path in the archives, without a leading ./ and "
        "the lines are sorted in byte order. Folders don't count. Leave both archives as they "
        "are, and nothing besides them and the report in the current directory.",
        files={**_under("old", before), **_under("new", after)},
        setup=f"tar -C old -czf {old} . && tar -C new -czf {new} . && rm -r old new",
        solution=f"""
work=$(mktemp -d)
mkdir "$work/a" "$work/b"
tar -xzf {old} -C "$work/a"
tar -xzf {new} -C "$work/b"
(cd "$work/a" && find . -type f | sed 's,^\\./,,' | while read -r f; do
  if [ ! -e "$work/b/$f" ]; then echo "removed $f"
  elif ! cmp -s "$f" "$work/b/$f"; then echo "changed $f"; fi
done) > "$work/list"
(cd "$work/b" && find . -type f | sed 's,^\\./,,' | while read -r f; do
  [ -e "$work/a/$f" ] || echo "added $f"
done) >> "$work/list"
LC_ALL=C sort "$work/list" > {out}
rm -r "$work"
""",
        expect=(
            text(out, "\n".join(sorted(lines))),
            names(".", [old, new, out]),
            members(old, before),
            members(new, after),
        ),
        changes=(*_under("old", before), *_under("new", after)),
    )


def _damaged(draw: Draw) -> Task:
    """Unpack what is sound, name what is not."""
    parts = draw.picks(THINGS, 4)
    out, target = draw.file(("txt",)), draw.pick(FOLDERS)
    sets = {part: {f"{part}-{at}.txt": draw.content() * 30 for at in (1, 2)} for part in parts}
    broken = draw.shuffled(parts)[: draw.number(1, 2)]
    packing = "\n".join(
        f"tar -C {part} -cf - . | gzip -n > {part}.tar.gz && rm -r {part}" for part in parts
    )
    damage = "\n".join(f"truncate -s -30 {part}.tar.gz" for part in broken)
    sound = {
        name: data for part in parts if part not in broken for name, data in sets[part].items()
    }
    given = {f"{part}/{name}": data for part, files in sets.items() for name, data in files.items()}
    return Task(
        label=f"damaged {parts[0]}",
        instruction="Some of the .tar.gz archives in the current directory were cut off during a "
        f"copy. Write the names of the damaged ones to {out}, one per line in alphabetical order. "
        f"Extract all the sound ones into a new directory {target}; no file from a damaged "
        "archive may end up there. Keep all the archives where they are.",
        files=given,
        setup=f"{packing}\n{damage}",
        solution=f"""
mkdir {target}
for archive in *.tar.gz; do
  if gzip -t "$archive" 2> /dev/null; then tar -xzf "$archive" -C {target}
  else echo "$archive"; fi
done | LC_ALL=C sort > {out}
""",
        expect=(
            text(out, "\n".join(sorted(f"{part}.tar.gz" for part in broken))),
            names(target, list(sound)),
            *(unchanged(f"{target}/{name}", data) for name, data in sound.items()),
            *(members(f"{part}.tar.gz", sets[part]) for part in parts if part not in broken),
            names(
                ".",
                [out, *(f"{target}/{name}" for name in sound), *(f"{p}.tar.gz" for p in parts)],
            ),
        ),
        changes=tuple(given),
    )


def _strip(draw: Draw) -> Task:
    """Extract one folder of an archive without its leading path."""
    archive, target = f"{draw.pick(THINGS)}.tar.gz", draw.pick(FOLDERS)
    root, part = draw.picks(THINGS, 2)
    inside = {name.replace("/", "-"): data for name, data in _contents(draw, 4).items()}
    inside[f"{draw.pick(FOLDERS)}/notes.txt"] = draw.content()
    files = {
        **_under(f"{root}/share/{part}", inside),
        **_under(f"{root}/share/{part}-old", _contents(draw, 2)),
        **_under(f"{root}/bin", _contents(draw, 2)),
    }
    return Task(
        label=f"strip {root}",
        instruction=f"From {archive}, extract only what lies below {root}/share/{part}, into a new "
        f"directory {target}, without the leading {root}/share/{part}: a file "
        f"{root}/share/{part}/x/y.txt would become {target}/x/y.txt. Nothing else of the archive "
        "may be left in the current directory, and the archive stays.",
        files=files,
        setup=f"tar -czf {archive} {root} && rm -r {root}",
        solution=f"mkdir {target}\ntar -xzf {archive} -C {target} --strip-components=3 "
        f"{root}/share/{part}",
        expect=(
            names(".", [archive, *(f"{target}/{name}" for name in inside)]),
            *(unchanged(f"{target}/{name}", data) for name, data in inside.items()),
            members(archive, files),
        ),
        changes=tuple(files),
    )


def _perms(draw: Draw) -> Task:
    """One of four policies over a tree whose modes are all over the place."""
    root, out = draw.pick(FOLDERS), draw.file(("txt",))
    stems = draw.picks(THINGS, 9)
    places = [root, f"{root}/{draw.pick(FOLDERS)}"]
    places += [f"{places[1]}/{draw.pick(FOLDERS)}"]
    files = {
        f"{places[at % 3]}/{stem}.{('sh', 'txt', 'cfg')[at // 3]}": f"#!/bin/sh\necho {stem}\n"
        for at, stem in enumerate(stems)
    }
    modes = {path: draw.choice((0o600, 0o644, 0o664, 0o666, 0o755, 0o777)) for path in files}
    open_to_all = sorted(files)[draw.number(0, 2) :: 3]
    modes |= dict.fromkeys(open_to_all, 0o666)
    folders = dict.fromkeys(places, 0o755)
    folders[places[2]] = 0o777
    kind = draw.variant(("policy", "offenders", "shared", "secret"))
    report: tuple[Expectation, ...] = ()
    if kind == "policy":
        ask = (
            f"Bring {root} into order: {root} itself and all directories below it get mode 750, "
            "every .sh file 750, and all other files 640."
        )
        commands = (
            f"find {root} -type d -exec chmod 750 {{}} +; find {root} -type f -exec chmod 640 {{}} "
            f"+; find {root} -type f -name '*.sh' -exec chmod 750 {{}} +"
        )
        after = {path: 0o750 if path.endswith(".sh") else 0o640 for path in files}
        after |= dict.fromkeys(folders, 0o750)
    elif kind == "offenders":
        ask = (
            f"Write to {out} the paths of all regular files in {root}, subdirectories included, "
            f"that everybody may write to (like {root}/x.txt, one per line, in byte order). Then "
            "take that permission for others away from them, and change no other permission bit "
            "of anything."
        )
        commands = (
            f"find {root} -type f -perm -o+w | LC_ALL=C sort > {out}; "
            f"xargs -r -d '\\n' chmod o-w < {out}"
        )
        after = {path: bits & ~0o002 for path, bits in modes.items()} | folders
        offenders = sorted(path for path, bits in modes.items() if bits & 0o002)
        report = (text(out, "\n".join(offenders)),)
    elif kind == "shared":
        ask = (
            f"Make {root} a shared directory: {root} and every directory below it gets mode 2770 "
            "(with the set-group-id bit), every file mode 660, except that files their owner "
            "could execute before keep execution for owner and group (770)."
        )
        commands = (
            f"find {root} -type f -perm -u+x -exec chmod 770 {{}} + , -type f ! -perm -u+x "
            f"-exec chmod 660 {{}} +; find {root} -type d -exec chmod 2770 {{}} +"
        )
        after = {path: 0o770 if bits & 0o100 else 0o660 for path, bits in modes.items()}
        after |= dict.fromkeys(folders, 0o2770)
    else:
        ask = (
            f"The .cfg files below {root} hold passwords. Give each of them mode 600, and make "
            f"every directory of {root} that directly contains one (and only those) mode 700. "
            "All other modes stay as they are."
        )
        commands = (
            f"find {root} -name '*.cfg' -type f -exec chmod 600 {{}} + -printf '%h\\n' | sort -u "
            "| xargs -r -d '\\n' chmod 700"
        )
        holders = {path.rpartition("/")[0] for path in files if path.endswith(".cfg")}
        after = {path: 0o600 if path.endswith(".cfg") else bits for path, bits in modes.items()}
        after |= {path: 0o700 if path in holders else bits for path, bits in folders.items()}
    setting = "\n".join(f"chmod {bits:o} {path}" for path, bits in {**modes, **folders}.items())
    return Task(
        label=f"{root} {kind}",
        instruction=f"{ask} The files' content and names must not change.",
        files=files,
        setup=setting,
        solution=commands,
        expect=(
            *report,
            *(mode(path, bits) for path, bits in after.items()),
            names(root, [path.removeprefix(f"{root}/") for path in files]),
        ),
    )


def _links(draw: Draw) -> Task:
    """Replace broken links and copies by what a release folder should look like."""
    root = draw.pick(THINGS)
    versions = [f"{draw.number(1, 3)}.{minor}.{draw.number(0, 9)}" for minor in (2, 9, 10, 11)]
    versions = sorted(
        {f"1.{version.split('.', 1)[1]}" for version in versions},
        key=lambda version: [int(part) for part in version.split(".")],
    )
    order = draw.shuffled(versions)
    files = {f"{root}/{version}/about.txt": f"{root} {version}\n" for version in order}
    newest, gone = versions[-1], versions[:-2]
    kept = versions[-2:]
    return Task(
        label=f"{root} releases",
        instruction=f"{root} holds one directory per release, named by its version. Remove all "
        "but the two newest releases (versions compare number by number, so 1.10.0 is newer than "
        f"1.9.0), and make {root}/current a symbolic link to the newest, with a relative target "
        f"(just the version). A broken link of that name may be there already.",
        files=files,
        setup=f"ln -s 0.0.0 {root}/current",
        solution=f"""
cd {root}
ls -d [0-9]* | sort -V | head -n -2 | xargs -d '\\n' rm -r
ln -sfn "$(ls -d [0-9]* | sort -V | tail -n 1)" current
""",
        expect=(
            names(root, ["current", *(f"{version}/about.txt" for version in kept)]),
            *(
                unchanged(f"{root}/{version}/about.txt", files[f"{root}/{version}/about.txt"])
                for version in kept
            ),
            *(absent(f"{root}/{version}") for version in gone),
            *(folder(f"{root}/{version}") for version in kept),
            link(f"{root}/current", newest),
        ),
        changes=tuple(files),
    )


def _permissions(draw: Draw) -> Task:
    """Modes of a tree, or the links of a release folder."""
    return _links(draw) if draw.index % 5 == 4 else _perms(draw)


BUILDERS: dict[str, Builder] = {"archive": _archive, "permissions": _permissions}

"""Tier 3, git: what a repository's history holds, and changing it without losing any."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import Expectation, commits, committed, text, unchanged
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import KEEP, PEOPLE, THINGS

FIRST_TIME = 1_700_000_000  # author time of a repository's first commit
DAY_S = 86_400


@dataclass(slots=True)
class _Repository:
    """A repository as it is being written: its files now, its log, its set-up script."""

    name: str
    files: dict[str, str] = field(default_factory=dict[str, str])
    log: list[str] = field(default_factory=list[str])
    script: list[str] = field(default_factory=list[str])
    clock: int = FIRST_TIME

    def start(self) -> None:
        """Make the repository, with an identity of its own to commit with."""
        self.script += [
            f"git init -q -b main {self.name}",
            f"cd {self.name}",
            "git config user.name builder",
            "git config user.email builder@example.org",
        ]

    def commit(self, subject: str, author: str, changes: Mapping[str, str | None]) -> None:
        """Write files, or remove them (None), and commit."""
        for path, content in changes.items():
            if content is None:
                del self.files[path]
                self.script.append(f"git rm -q {path}")
            else:
                self.files[path] = content
                self.script.append(f"printf %s {shlex.quote(content)} > {path}; git add {path}")
        self.clock += DAY_S
        self.log.append(f"{subject}|{author}|{self.clock}")
        self.script.append(
            f"GIT_AUTHOR_NAME={author} GIT_AUTHOR_EMAIL={author}@example.org "
            f"GIT_AUTHOR_DATE='{self.clock} +0000' GIT_COMMITTER_DATE='{self.clock} +0000' "
            f"git commit -q -m {shlex.quote(subject)}"
        )

    def setup(self) -> str:
        """The whole script."""
        return "\n".join(self.script)

    def unchanged(self) -> tuple[Expectation, ...]:
        """The main branch and its working tree are as they were."""
        return (
            commits(self.name, "main", self.log),
            *(unchanged(f"{self.name}/{path}", content) for path, content in self.files.items()),
        )


def _lines(draw: Draw, count: int) -> str:
    return "".join(f"{word} = {draw.number(10, 99)}\n" for word in draw.picks(THINGS, count))


def _history(draw: Draw) -> Task:
    """One of five jobs on a small repository."""
    repo = _Repository(draw.pick(THINGS))
    people = draw.picks(PEOPLE, 3)
    repo.start()
    repo.commit("Start the project", people[0], {"readme.md": f"# {repo.name}\n"})
    repo.commit("Add default settings", people[1], {"settings.cfg": _lines(draw, 4)})
    build = draw.variant((_restore, _blame, _revert, _merge, _branch_at))
    return build(draw, repo, people)


def _restore(draw: Draw, repo: _Repository, people: list[str]) -> Task:
    lost = draw.content()
    repo.commit("Write down the plan", people[2], {"plan.txt": draw.content()})
    repo.commit("Extend the plan", people[0], {"plan.txt": lost + draw.content()})
    last = repo.files["plan.txt"]
    repo.commit("Tune a setting", people[1], {"settings.cfg": _lines(draw, 4)})
    repo.commit("Clean up", people[2], {"plan.txt": None})
    repo.commit("Describe the project", people[0], {"readme.md": f"# {repo.name}\n\n{lost}"})
    return Task(
        label=f"restore {repo.name}",
        instruction=f"In the git repository {repo.name} somebody deleted plan.txt in an earlier "
        "commit. Bring it back with the content it had right before it was deleted, and commit "
        "it on main as one new commit. The history so far must not be rewritten, and no other "
        "file may change.",
        setup=repo.setup(),
        solution=f"""
cd {repo.name}
gone=$(git rev-list -n 1 HEAD -- plan.txt)
git checkout -q "$gone^" -- plan.txt
git commit -q -m "Bring the plan back"
""",
        expect=(
            commits(repo.name, "main", repo.log, more=1),
            committed(repo.name, "main", {**repo.files, "plan.txt": last}),
            unchanged(f"{repo.name}/plan.txt", last),
        ),
    )


def _blame(draw: Draw, repo: _Repository, people: list[str]) -> Task:
    key = draw.pick(THINGS)
    old, bad = draw.number(10, 99), draw.number(100, 999)
    base = repo.files["settings.cfg"]
    repo.commit(f"Introduce {key}", people[0], {"settings.cfg": base + f"{key} = {old}\n"})
    repo.commit("Add notes", people[1], {"notes.txt": draw.content()})
    culprit, subject = draw.choice(people), draw.choice(("Speed things up", "Small fixes", "Tidy"))
    repo.commit(subject, culprit, {"settings.cfg": base + f"{key} = {bad}\n"})
    repo.commit("More notes", people[2], {"notes.txt": draw.content()})
    more = _lines(draw, 1)
    repo.commit("Another setting", people[0], {"settings.cfg": base + f"{key} = {bad}\n{more}"})
    return Task(
        label=f"blame {repo.name}",
        instruction=f"The setting {key} in {repo.name}/settings.cfg (a git repository) is {bad} "
        f"today, and used to be {old}. Find the commit that changed it. Write two lines to "
        "answer.txt in the current directory: the author's name, then the commit's subject line. "
        "Leave the repository as it is.",
        setup=repo.setup(),
        solution=f"""
git -C {repo.name} log -1 -S'{key} = {bad}' --format='%an%n%s' -- settings.cfg > answer.txt
""",
        expect=(text("answer.txt", f"{culprit}\n{subject}"), *repo.unchanged()),
    )


def _revert(draw: Draw, repo: _Repository, people: list[str]) -> Task:
    before = dict(repo.files)
    subject = draw.choice(("Switch to fast mode", "Try other defaults", "Change all defaults"))
    repo.commit(subject, people[0], {"settings.cfg": _lines(draw, 4), "extra.cfg": _lines(draw, 2)})
    notes = draw.content()
    repo.commit("Add notes", people[1], {"notes.txt": notes})
    repo.commit("Describe the project", people[2], {"readme.md": f"# {repo.name}\n\n{notes}"})
    after = {**repo.files, "settings.cfg": before["settings.cfg"]}
    del after["extra.cfg"]
    return Task(
        label=f"revert {repo.name}",
        instruction=f'The commit "{subject}" in the git repository {repo.name} turned out to be '
        "a mistake. Undo exactly what it changed, in one new commit on main, and keep everything "
        "that was committed after it. Don't rewrite history; the working tree must match the new "
        "commit.",
        setup=repo.setup(),
        solution=f"""
cd {repo.name}
git revert --no-edit "$(git log --format=%h --grep '^{subject}$')"
""",
        expect=(
            commits(repo.name, "main", repo.log, more=1),
            committed(repo.name, "main", after),
            *(unchanged(f"{repo.name}/{path}", content) for path, content in after.items()),
        ),
    )


def _merge(draw: Draw, repo: _Repository, people: list[str]) -> Task:
    ours, theirs, base = (draw.number(low, low + 99) for low in (100, 300, 500))
    retry, timeout = draw.picks(THINGS, 2)

    def settings(first: int, second: int) -> str:
        return f"{retry} = {first}\n{timeout} = {second}\n"

    repo.commit("Two limits", people[0], {"limits.cfg": settings(base, base)})
    branch = f"feature-{draw.pick(THINGS)}"
    repo.script.append(f"git checkout -q -b {branch}")
    saved, trunk = list(repo.log), dict(repo.files)
    added = draw.content()
    repo.commit(
        "New limits", people[1], {"limits.cfg": settings(theirs, theirs), "guide.txt": added}
    )
    repo.script.append("git checkout -q main")
    repo.log, repo.files = list(saved), trunk
    repo.commit("Other limits", people[2], {"limits.cfg": settings(ours, ours)})
    merged = settings(ours, theirs)
    after = {**repo.files, "limits.cfg": merged, "guide.txt": added}
    return Task(
        label=f"merge {repo.name}",
        instruction=f"Merge the branch {branch} into main in the git repository {repo.name}, with "
        f"a merge commit. limits.cfg conflicts: in the result {retry} must have main's value "
        f"and {timeout} that of {branch}, two lines in the present order and no conflict "
        "markers. Everything else comes from the merge. Stay on main, with the merge committed.",
        setup=repo.setup(),
        solution=f"""
cd {repo.name}
git merge -q {branch} > /dev/null || true
printf '{retry} = {ours}\\n{timeout} = {theirs}\\n' > limits.cfg
git add limits.cfg
git commit -q -m 'Merge {branch}'
""",
        expect=(
            commits(repo.name, "main", repo.log, more=1),
            commits(repo.name, "HEAD^2", [*saved, f"New limits|{people[1]}|{repo.clock - DAY_S}"]),
            committed(repo.name, "main", after, parents=2),
            unchanged(f"{repo.name}/limits.cfg", merged),
        ),
    )


def _branch_at(draw: Draw, repo: _Repository, people: list[str]) -> Task:
    keep = draw.number(1, 3)
    for at in range(5):
        repo.commit(
            f"Step {at + 1}: {draw.pick(THINGS)}",
            draw.choice(people),
            {"steps.txt": "".join(f"step {n + 1}\n" for n in range(at + 1))},
        )
    wanted = f"step {keep + 1}"
    log = repo.log[: 2 + keep + 1]
    files = {**repo.files, "steps.txt": "".join(f"step {n + 1}\n" for n in range(keep + 1))}
    branch, tag = f"release-{draw.number(1, 9)}", f"v{draw.number(1, 9)}.{draw.number(0, 9)}"
    return Task(
        label=f"branch {repo.name}",
        instruction=f"In the git repository {repo.name}, find the first commit in which steps.txt "
        f'contains the line "{wanted}". Create a branch named {branch} that points to that very '
        f"commit, and a tag {tag} on the commit before it. main must stay where it is, and stay "
        f"checked out. {draw.choice(KEEP)}",
        setup=repo.setup(),
        solution=f"""
cd {repo.name}
at=$(git log --reverse --format=%H -S'{wanted}' -- steps.txt | head -n 1)
git branch {branch} "$at"
git tag {tag} "$at^"
""",
        expect=(
            commits(repo.name, f"refs/heads/{branch}", log),
            committed(repo.name, f"refs/heads/{branch}", files),
            commits(repo.name, f"refs/tags/{tag}", log[:-1]),
            commits(repo.name, "HEAD", repo.log),
            *repo.unchanged(),
            unchanged(f"{repo.name}/.git/HEAD", "ref: refs/heads/main\n"),
        ),
    )


BUILDERS: dict[str, Builder] = {"history": _history}

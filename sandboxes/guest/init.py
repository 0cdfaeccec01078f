"""PID 1 of a local sandbox: serves commands and file transfers over a socket.

Invariants:
- It is PID 1 of its namespace: no signal from inside can end it, and when it
  ends the kernel ends everything else.  It ends when its owner's socket closes.
- It waits in one place only, for any of its descriptors: what was reported readable
  may have been read since, so output is read without waiting.
- A command never holds the call: the answer goes out when its shell has ended;
  what a background job prints later is read and dropped, so that it lives on.
- Output is cut here, to head and tail; at most the limit reaches the owner.
- It is not dumpable, so nothing inside can trace it or read its memory.
- Each request comes on a connection of its own, whose descriptor arrives over
  the control socket.
- Where it is told to, it watches the memory of everything in here, and ends all
  other processes when they use too much.
"""

from __future__ import annotations

import _socket
import os
import select
import struct
import time

from sandboxes.guest.bounds import memory_in_use, set_bounds
from sandboxes.guest.killing import kill_everything, kill_tree, reap, remove_traps
from sandboxes.guest.output import Stream, read_now
from sandboxes.guest.shell import supervise
from sandboxes.guest.syscalls import refuse_calls
from sandboxes.guest.transfer import in_child, serve
from sandboxes.guest.wire import receive, send

REQUEST_TIMEOUT_S = 60.0  # the owner sends a request at once
REAP_EVERY_S = 2.0  # orphans that end while nothing else happens
WATCH_EVERY_S = 0.1  # a core fills a few hundred MiB in this time
STATUS_BYTES = 16  # an exit code, written at once
EXIT_TIMED_OUT = 124
EXIT_KILLED = 137


class Job:
    """One command: its supervisor, its output and when it must end."""

    def __init__(self, conn: _socket.socket, pid: int, status_fd: int, deadline: float) -> None:
        self.conn = conn
        self.pid = pid
        self.status_fd = status_fd
        self.deadline = deadline
        self.streams: list[Stream] = []


class Daemon:
    """The event loop: new requests, output, ends and deadlines of commands."""

    def __init__(self, control: _socket.socket, single_uid: bool, watched_bytes: int) -> None:
        self.control = control
        self.control_fd = control.fileno()
        self.single_uid = single_uid
        self.watched_bytes = watched_bytes
        self.next_watch = 0.0
        self.poll = select.poll()
        self.poll.register(self.control_fd, select.POLLIN)
        self.jobs: list[Job] = []
        self.by_fd: dict[int, Job | None] = {}  # None: a pipe whose command has ended

    def accept(self) -> None:
        """Take one connection and serve its request."""
        _, ancillary, _, _ = self.control.recvmsg(1, _socket.CMSG_SPACE(4))
        if not ancillary:
            os._exit(0)  # the owner closed its end: the sandbox is over
        (fd,) = struct.unpack("i", ancillary[0][2][:4])
        conn = _socket.socket(fileno=fd)
        conn.settimeout(REQUEST_TIMEOUT_S)
        try:
            request = receive(conn)
            if request[0] == b"exec":
                self.start(conn, request)
                return
            if request[0] == b"kill":
                ended = kill_everything()
                remove_traps()
                send(conn, b"ok" if ended else b"left")
            elif request[0] in (b"fill", b"load", b"look"):
                # A fresh sandbox has no commands that it could delay; a look is short.
                serve(conn, request)
            else:
                conn.setblocking(True)
                in_child(conn, request)
        except (OSError, EOFError):
            pass  # the owner gave up on this request; its end is closed
        conn.close()

    def start(self, conn: _socket.socket, request: list[bytes]) -> None:
        """Start one command; parts 5 and 6 are its time limit and `limit merged`."""
        limit, merged = (int(field) for field in request[6].split())
        out_read, out = os.pipe()
        err_read, err = (out_read, out) if merged else os.pipe()
        status_read, status = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            os.write(err, f"sandbox: cannot start a process: {error}\n".encode())
        if pid == 0:
            supervise(request, out, err, status, self.single_uid)
        for fd in {out, err, status}:
            os.close(fd)
        job = Job(conn, pid, status_read, time.monotonic() + float(request[5]))
        job.streams = [Stream(fd, limit) for fd in dict.fromkeys((out_read, err_read))]
        for fd in (status_read, conn.fileno(), *(stream.fd for stream in job.streams)):
            self.by_fd[fd] = job
            self.poll.register(fd, select.POLLIN)
        self.jobs.append(job)
        self.start_watching()

    def forget(self, fd: int) -> None:
        """Stop watching and close one descriptor."""
        self.poll.unregister(fd)
        del self.by_fd[fd]
        os.close(fd)

    def finish(self, job: Job, code: int, timed_out: bool) -> None:
        """Answer for a command that has ended; keep reading what outlives it."""
        self.jobs.remove(job)
        self.forget(job.status_fd)
        parts: list[bytes] = []
        for stream in job.streams:
            if self.by_fd.get(stream.fd) is job:
                stream.drain()
                self.by_fd[stream.fd] = None
            parts.extend(stream.parts())
        conn_fd = job.conn.fileno()
        self.poll.unregister(conn_fd)
        del self.by_fd[conn_fd]
        self.answer(job, str(code).encode(), b"1" if timed_out else b"0", *parts)
        job.conn.close()

    def answer(self, job: Job, *parts: bytes) -> None:
        """Send the answer; the owner may have given up on this command."""
        try:
            send(job.conn, *parts)
        except OSError:
            return

    def stop(self, job: Job, timed_out: bool) -> None:
        """Kill a command that is out of time or no longer wanted."""
        if job.pid > 0:
            kill_tree(job.pid)
        self.finish(job, EXIT_TIMED_OUT if timed_out else EXIT_KILLED, timed_out)

    def handle(self, fd: int) -> None:
        """React to one readable descriptor."""
        job = self.by_fd[fd]
        if job is None:
            if read_now(fd) == b"":
                self.forget(fd)
        elif fd == job.status_fd:
            status = os.read(fd, STATUS_BYTES)
            self.finish(job, int(status) if status else EXIT_KILLED, False)
        elif fd == job.conn.fileno():
            self.stop(job, False)
        elif not next(stream for stream in job.streams if stream.fd == fd).read():
            self.forget(fd)

    def watch(self) -> None:
        """End everything if it uses too much memory; look less often while nothing does."""
        now = time.monotonic()
        if not self.watched_bytes or now < self.next_watch:
            return
        used = memory_in_use()
        if used > self.watched_bytes:
            kill_everything()
        self.next_watch = now + (WATCH_EVERY_S if used or self.jobs else REAP_EVERY_S)

    def start_watching(self) -> None:
        """Something new runs: look soon."""
        self.next_watch = min(self.next_watch, time.monotonic() + WATCH_EVERY_S)

    def wait(self) -> list[tuple[int, int]]:
        """Wait for a descriptor, a deadline, or the next look at memory."""
        now = time.monotonic()
        waits = [job.deadline - now for job in self.jobs]
        if self.watched_bytes:
            waits.append(self.next_watch - now)
        return self.poll.poll(1000 * max(0.0, min([REAP_EVERY_S, *waits])))

    def begin(self, processes: int) -> None:
        """Close the door behind us, say that we are ready and what holds, serve."""
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, self.control_fd)
        os.closerange(self.control_fd + 1, 4096)
        os.chmod("/dev/shm", 0o1777)
        bounds = set_bounds(processes)
        bounds["calls"] = refuse_calls()
        holding = " ".join(name for name, holds in bounds.items() if holds)
        self.control.send(f"ready {holding}".encode())
        self.serve()

    def serve(self) -> None:
        """Run until the owner closes the control socket."""
        while True:
            ready = self.wait()
            for fd, _ in ready:
                if fd == self.control_fd:
                    self.accept()
                elif fd in self.by_fd:
                    self.handle(fd)
            for job in [job for job in self.jobs if job.deadline <= time.monotonic()]:
                self.stop(job, True)
            self.watch()
            reap()

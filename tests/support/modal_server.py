"""A server that speaks Modal's own wire protocol, for the tests of what is asked of it.

Every call is recorded; what is not answered here gets an empty reply of its type.
Sandboxes exist as far as they can be created, listed by tag, and terminated; files
that are uploaded are kept; commands are recorded and exit with 0; what the workspace
has spent is what the books say.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from grpclib import GRPCError, Status
from grpclib.server import Server, Stream
from modal_proto import api_grpc, api_pb2, task_command_router_pb2
from modal_proto import task_command_router_grpc as router_grpc

TOKEN_LIFETIME_S = 3600
START_TIMEOUT_S = 30.0
WORKSPACE = "our-lab"
FILE_TOOL = "/__modal/.bin/modal-sandbox-fs-tools"


@dataclass
class ModalSandbox:
    """A sandbox that was asked for."""

    id: str
    request: api_pb2.SandboxCreateV2Request
    created_at: float
    terminated: bool = False


@dataclass
class ModalBooks:
    """What the server was asked for."""

    calls: list[tuple[str, Message]] = field(default_factory=list)
    sandboxes: list[ModalSandbox] = field(default_factory=list)
    execs: list[task_command_router_pb2.TaskExecStartRequest] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    pieces: list[int] = field(default_factory=list)
    failing_creates: int = 0
    costs: list[api_pb2.WorkspaceBillingReportItem] = field(default_factory=list)

    def of(self, name: str) -> list[Any]:
        """The requests of the calls to `name`."""
        return [request for called, request in self.calls if called == name]


def _token() -> str:
    claims = json.dumps({"exp": time.time() + TOKEN_LIFETIME_S}).encode()
    return f"e30.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.x"


class ModalServer:
    """Serves on a port of this machine, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self.books = ModalBooks()
        self.answers: dict[str, Callable[[Any], Any]] = {**self._api(), **self._router()}
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ModalServer:
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError("the server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        services = [
            _service(api_grpc.ModalClientBase, self),
            _service(router_grpc.TaskCommandRouterBase, self),
        ]

        async def start() -> Server:
            server = Server(services)
            # Named as TCP, a connection sends its replies at once: 1 ms in the place of 40.
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            self.port = listening.getsockname()[1]
            await server.start(sock=listening)
            self._started.set()
            return server

        server = self._loop.run_until_complete(start())
        self._loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self._loop)
        for task in left:  # of clients that keep their connection
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def _api(self) -> dict[str, Callable[[Any], Any]]:
        """Answers of the control plane, by the call's name."""
        success = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        return {
            "AuthTokenGet": lambda _: api_pb2.AuthTokenGetResponse(token=_token()),
            "AppGetOrCreate": lambda _: api_pb2.AppGetOrCreateResponse(app_id="ap-1"),
            "EnvironmentGetOrCreate": lambda _: api_pb2.EnvironmentGetOrCreateResponse(
                environment_id="en-1", metadata=api_pb2.EnvironmentMetadata(settings=settings)
            ),
            "MountPutFile": lambda _: api_pb2.MountPutFileResponse(exists=True),
            "MountGetOrCreate": lambda _: api_pb2.MountGetOrCreateResponse(
                mount_id="mo-1", handle_metadata=api_pb2.MountHandleMetadata()
            ),
            "ImageGetOrCreate": lambda _: api_pb2.ImageGetOrCreateResponse(
                image_id="im-1", result=success
            ),
            "SandboxCreateV2": self._create,
            "SandboxGetCommandRouterAccess": lambda _: (
                api_pb2.SandboxGetCommandRouterAccessResponse(url=self.url, jwt=_token())
            ),
            "SandboxListV2": self._list,
            "SandboxTagsGetV2": lambda request: api_pb2.SandboxTagsGetResponse(
                tags=self._find(request.sandbox_id).request.tags
            ),
            "SandboxTerminateV2": self._terminate,
            "SandboxWaitV2": lambda _: api_pb2.SandboxWaitResponse(result=success),
            "WorkspaceNameLookup": lambda _: api_pb2.WorkspaceNameLookupResponse(
                username=WORKSPACE
            ),
            "WorkspaceBillingReport": lambda _: self.books.costs,
        }

    def _router(self) -> dict[str, Callable[[Any], Message]]:
        """Answers of the machine that runs a sandbox, by the call's name."""
        return {
            "TaskExecStart": self._exec,
            "TaskExecWait": lambda _: task_command_router_pb2.TaskExecWaitResponse(code=0),
            "TaskExecPoll": lambda _: task_command_router_pb2.TaskExecPollResponse(code=0),
        }

    def _create(self, request: api_pb2.SandboxCreateV2Request) -> Message:
        if self.books.failing_creates:
            self.books.failing_creates -= 1
            raise GRPCError(Status.FAILED_PRECONDITION, "no capacity")
        number = len(self.books.sandboxes) + 1
        sandbox = ModalSandbox(f"sb-{number}", request, time.monotonic())
        self.books.sandboxes.append(sandbox)
        return api_pb2.SandboxCreateV2Response(sandbox_id=sandbox.id, task_id=f"ta-{number}")

    def _find(self, sandbox_id: str) -> ModalSandbox:
        return next(each for each in self.books.sandboxes if each.id == sandbox_id)

    def _list(self, request: api_pb2.SandboxListRequest) -> Message:
        """Modal's pages go back in time; here the second one is always empty."""
        wanted = {(tag.tag_name, tag.tag_value) for tag in request.tags}
        found = [
            api_pb2.SandboxInfo(id=each.id, created_at=1.0)
            for each in self.books.sandboxes
            if not each.terminated
            and wanted <= {(tag.tag_name, tag.tag_value) for tag in each.request.tags}
        ]
        return api_pb2.SandboxListResponse(sandboxes=[] if request.before_timestamp else found)

    def _terminate(self, request: api_pb2.SandboxTerminateRequest) -> Message:
        self._find(request.sandbox_id).terminated = True
        return api_pb2.SandboxTerminateResponse()

    def _exec(self, request: task_command_router_pb2.TaskExecStartRequest) -> Message:
        self.books.execs.append(request)
        return task_command_router_pb2.TaskExecStartResponse()

    async def stdin(self, stream: Stream[Any, Any]) -> None:
        """Keep what a file transfer sends under the path that its command names."""
        content, exec_id = b"", ""
        async for message in stream:
            if message.HasField("start"):
                exec_id = message.start.exec_id
            elif message.HasField("end"):
                break
            else:
                content += message.data
                self.books.pieces.append(len(message.data))
        command = next(each for each in self.books.execs if each.exec_id == exec_id).command_args
        assert command[0] == FILE_TOOL
        self.books.files[json.loads(command[1])["WriteFile"]["path"]] = content
        await stream.send_message(task_command_router_pb2.TaskExecStdinWriteStreamResponse())


def _service(base: Any, server: ModalServer) -> Any:
    """An instance of the abstract service `base`, every method of it answered."""
    names = {path.rsplit("/", 1)[1] for path in _mapping(base)}
    replies = {path.rsplit("/", 1)[1]: handler for path, handler in _mapping(base).items()}

    def answering(name: str) -> Callable[[Any, Stream[Any, Any]], Awaitable[None]]:
        async def answer(_: Any, stream: Stream[Any, Any]) -> None:
            if name == "TaskExecStdinWriteStream":
                await server.stdin(stream)
                return
            request = await stream.recv_message()
            assert request is not None
            server.books.calls.append((name, request))
            known = server.answers.get(name)
            if not replies[name].cardinality.server_streaming:
                await stream.send_message(known(request) if known else replies[name].reply_type())
                return
            for reply in known(request) if known else ():
                await stream.send_message(reply)

        return answer

    return type("Service", (base,), {name: answering(name) for name in names})()


def _mapping(base: Any) -> dict[str, Any]:
    """The handlers of an abstract service by path."""
    hollow = type("Hollow", (base,), dict.fromkeys(base.__abstractmethods__))
    return hollow().__mapping__()

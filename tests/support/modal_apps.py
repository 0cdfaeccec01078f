"""The part of Modal's server that rents machines: apps, functions, calls, secrets, claims.

Calls end when a test gives them an answer, or with `answer`.  An app is there under its
name once it is published; a secret, a volume and an environment once somebody has made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from grpclib import GRPCError, Status
from modal._serialization import deserialize_data_format, serialize_data_format
from modal_proto import api_pb2

from tests.support.modal_server import WORKSPACE, ModalBooks, ModalServer

CREATES = {
    "AppCreate",
    "AppPublish",
    "FunctionPrecreate",
    "FunctionCreate",
    "FunctionMap",
    "ImageGetOrCreate",
    "MountGetOrCreate",
    "DictUpdate",
}
PICKLE = api_pb2.DATA_FORMAT_PICKLE


@dataclass
class ModalCall:
    """A call of a function."""

    id: str
    function: str
    arguments: tuple[Any, ...]
    output: str | None = None
    cancelled: bool = False


@dataclass
class ModalApps:
    """What there is at Modal, and what is said of it."""

    server: ModalServer
    workspace: str = WORKSPACE
    environments: set[str] = field(default_factory=lambda: {"main"})
    secrets: dict[str, str] = field(default_factory=lambda: {"terminal-rl": "st-1"})
    volumes: dict[str, str] = field(default_factory=dict)
    apps: dict[str, str] = field(default_factory=dict)
    functions: dict[tuple[str, str], str] = field(default_factory=dict)
    calls: list[ModalCall] = field(default_factory=list)
    dicts: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    failing: dict[str, Status] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    answer: Callable[[ModalCall], str] | None = None

    books: ModalBooks = field(default_factory=ModalBooks)

    def __post_init__(self) -> None:
        self.server.books = self.books  # the ones before keep theirs
        for name, handler in self._answers().items():
            self.server.answers[name] = self._guarded(name, handler)

    def asked(self, name: str) -> list[Any]:
        """The requests of the calls to `name`."""
        return self.books.of(name)

    def created(self) -> list[str]:
        """The names of the calls that make something."""
        return [name for name, _ in self.books.calls if name in CREATES]

    def function(self, name: str) -> api_pb2.Function:
        """What was asked for the function `name` last."""
        created = [request.function for request in self.asked("FunctionCreate")]
        return next(one for one in reversed(created) if one.function_name == name)

    def dockerfile(self, image_id: str) -> str:
        """All lines that an image is built of, its bases' first."""
        image = self.asked("ImageGetOrCreate")[int(image_id.removeprefix("im-")) - 1].image
        bases = [self.dockerfile(base.image_id) for base in image.base_images]
        return "\n".join([*bases, *image.dockerfile_commands])

    def context(self, image_id: str) -> dict[str, bytes]:
        """The files that an image's layers are built with."""
        image = self.asked("ImageGetOrCreate")[int(image_id.removeprefix("im-")) - 1].image
        files = {file.filename: file.data for file in image.context_files}
        for base in image.base_images:
            files |= self.context(base.image_id)
        return files

    def _guarded(self, name: str, handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def answer(request: Any) -> Any:
            if name in self.failing:
                raise GRPCError(self.failing[name], "as the test wants it")
            reply = handler(request)
            if name in self.lost:  # it was done, and nobody is told
                raise GRPCError(Status.FAILED_PRECONDITION, "the connection broke")
            return reply

        return answer

    def _answers(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "WorkspaceNameLookup": lambda _: api_pb2.WorkspaceNameLookupResponse(
                username=self.workspace
            ),
            "EnvironmentGetOrCreate": self._environment,
            "SecretGetOrCreate": self._secret,
            "VolumeGetOrCreate": self._volume,
            "AppGetOrCreate": self._app,
            "AppCreate": lambda request: api_pb2.AppCreateResponse(
                app_id=f"ap-{request.description}"
            ),
            "AppGetByDeploymentName": lambda request: api_pb2.AppGetByDeploymentNameResponse(
                app_id=self.apps.get(request.name, "")
            ),
            "AppPublish": self._publish,
            "ImageGetOrCreate": self._image,
            "FunctionPrecreate": lambda request: self._function(
                api_pb2.FunctionPrecreateResponse, request.app_id, request.function_name
            ),
            "FunctionCreate": self._create_function,
            "FunctionGet": self._lookup,
            "FunctionMap": self._call,
            "FunctionGetOutputs": self._outputs,
            "FunctionCallFetch": self._fetch,
            "FunctionCallCancel": self._cancel,
            "FunctionCallFromId": lambda request: api_pb2.FunctionCallFromIdResponse(
                function_call_id=request.function_call_id,
                num_inputs=1,
                metadata=api_pb2.FunctionCallHandleMetadata(app_id="ap-1", function_id="fu-1"),
            ),
            "DictGetOrCreate": self._dict,
            "DictUpdate": self._update,
            "DictGet": self._get,
            "AppGetLogs": self._tell,
        }

    def _environment(self, request: api_pb2.EnvironmentGetOrCreateRequest) -> Message:
        name = request.deployment_name
        if name and name not in self.environments:
            raise GRPCError(Status.NOT_FOUND, f"no environment {name}")
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        return api_pb2.EnvironmentGetOrCreateResponse(
            environment_id="en-1",
            metadata=api_pb2.EnvironmentMetadata(name=name or "main", settings=settings),
        )

    def _secret(self, request: api_pb2.SecretGetOrCreateRequest) -> Message:
        if not request.deployment_name:  # of the app
            return api_pb2.SecretGetOrCreateResponse(secret_id="st-of-app")
        if request.deployment_name not in self.secrets:
            raise GRPCError(Status.NOT_FOUND, f"no secret {request.deployment_name}")
        return api_pb2.SecretGetOrCreateResponse(secret_id=self.secrets[request.deployment_name])

    def _volume(self, request: api_pb2.VolumeGetOrCreateRequest) -> Message:
        name = request.deployment_name
        if request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self.volumes.setdefault(name, f"vo-{name}")
        if name not in self.volumes:
            raise GRPCError(Status.NOT_FOUND, f"no volume {name}")
        return api_pb2.VolumeGetOrCreateResponse(
            volume_id=self.volumes[name],
            version=request.version,
            metadata=api_pb2.VolumeMetadata(name=name, version=request.version),
        )

    def _app(self, request: api_pb2.AppGetOrCreateRequest) -> Message:
        if request.app_name not in self.apps:
            raise GRPCError(Status.NOT_FOUND, f"no app {request.app_name}")
        return api_pb2.AppGetOrCreateResponse(app_id=self.apps[request.app_name])

    def _publish(self, request: api_pb2.AppPublishRequest) -> Message:
        if request.app_state == api_pb2.APP_STATE_DEPLOYED:
            self.apps[request.name] = request.app_id
        return api_pb2.AppPublishResponse(url="https://modal.invalid/app")

    def _image(self, _: api_pb2.ImageGetOrCreateRequest) -> Message:
        success = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        number = len(self.asked("ImageGetOrCreate"))
        return api_pb2.ImageGetOrCreateResponse(image_id=f"im-{number}", result=success)

    def _function(self, reply: Any, app_id: str, name: str) -> Any:
        function_id = f"fu-{name}"
        self.functions[app_id, name] = function_id
        return reply(function_id=function_id, handle_metadata=self._handle(name))

    def _create_function(self, request: api_pb2.FunctionCreateRequest) -> Message:
        reply = self._function(
            api_pb2.FunctionCreateResponse, request.app_id, request.function.function_name
        )
        ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=request.function)
        reply.function_data.ranked_functions.append(ranked)
        return reply

    def _handle(self, name: str) -> api_pb2.FunctionHandleMetadata:
        return api_pb2.FunctionHandleMetadata(
            function_name=name,
            function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION,
            supported_input_formats=[PICKLE],
            supported_output_formats=[PICKLE],
        )

    def _lookup(self, request: api_pb2.FunctionGetRequest) -> Message:
        app_id = self.apps.get(request.app_name, "")
        if (app_id, request.object_tag) not in self.functions:
            raise GRPCError(Status.NOT_FOUND, f"no function {request.object_tag}")
        name = request.object_tag
        function = api_pb2.Function(function_name=name)
        ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=function)
        return api_pb2.FunctionGetResponse(
            function_id=self.functions[app_id, name],
            handle_metadata=self._handle(name),
            function=api_pb2.FunctionData(ranked_functions=[ranked]),
        )

    def _call(self, request: api_pb2.FunctionMapRequest) -> Message:
        item = request.pipelined_inputs[0]
        given: Any = deserialize_data_format(item.input.args, item.input.data_format, None)
        number = len(self.calls) + 1
        call = ModalCall(f"fc-{number}", request.function_id.removeprefix("fu-"), given[0])
        self.calls.append(call)
        return api_pb2.FunctionMapResponse(
            function_call_id=call.id,
            pipelined_inputs=[
                api_pb2.FunctionPutInputsResponseItem(idx=0, input_id=f"in-{number}")
            ],
        )

    def _found(self, call_id: str) -> ModalCall:
        return next(call for call in self.calls if call.id == call_id)

    def _outputs(self, request: api_pb2.FunctionGetOutputsRequest) -> Message:
        call = self._found(request.function_call_id)
        if call.output is None and self.answer is not None:
            call.output = self.answer(call)
        if call.cancelled:
            result = api_pb2.GenericResult(
                status=api_pb2.GenericResult.GENERIC_STATUS_TERMINATED, exception="cancelled"
            )
        elif call.output is None:
            return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=1)
        else:
            data = serialize_data_format(call.output, PICKLE)
            success = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
            result = api_pb2.GenericResult(status=success, data=data)
        return api_pb2.FunctionGetOutputsResponse(
            outputs=[api_pb2.FunctionGetOutputsItem(idx=0, result=result, data_format=PICKLE)]
        )

    def _fetch(self, request: api_pb2.FunctionCallFetchRequest) -> Message:
        status = api_pb2.FUNCTION_CALL_INPUT_STATUS_RUNNING
        return api_pb2.FunctionCallFetchResponse(
            function_call_inputs=[
                api_pb2.FunctionCallInputInfo(function_call_id=call.id, status=status)
                for call in self.calls
                if f"fu-{call.function}" == request.function_id
            ]
        )

    def _cancel(self, request: api_pb2.FunctionCallCancelRequest) -> Message:
        from google.protobuf.empty_pb2 import Empty

        self._found(request.function_call_id).cancelled = True
        return Empty()

    def _dict(self, request: api_pb2.DictGetOrCreateRequest) -> Message:
        name = request.deployment_name
        if request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self.dicts.setdefault(name, {})
        if name not in self.dicts:
            raise GRPCError(Status.NOT_FOUND, f"no dict {name}")
        return api_pb2.DictGetOrCreateResponse(dict_id=f"di-{name}")

    def _update(self, request: api_pb2.DictUpdateRequest) -> Message:
        entries = self.dicts[request.dict_id.removeprefix("di-")]
        created = True
        for update in request.updates:
            if request.if_not_exists and update.key in entries:
                created = False
            else:
                entries[update.key] = update.value
        return api_pb2.DictUpdateResponse(created=created)

    def _get(self, request: api_pb2.DictGetRequest) -> Message:
        value = self.dicts[request.dict_id.removeprefix("di-")].get(request.key)
        if value is None:
            return api_pb2.DictGetResponse(found=False)
        return api_pb2.DictGetResponse(found=True, value=value)

    def _tell(self, request: api_pb2.AppGetLogsRequest) -> list[Message]:
        text = self.logs.get(request.function_call_id, "")
        items = [api_pb2.TaskLogs(data=text)] if text else []
        return [api_pb2.TaskLogsBatch(entry_id="1-0", items=items, app_done=True)]

"""The wire contract: generated code is fresh, the protos pass their linter, and what is written by hand agrees with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from coterie.session import dial
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire import codec, fields
from coterie_server.transport import serve

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"


@pytest.mark.parametrize("module", [session_pb2, tensor_pb2])
def test_the_generated_code_is_fresh(module: object, tmp_path: Path) -> None:
    name = module.DESCRIPTOR.name  # type: ignore[attr-defined]
    target = tmp_path / "set.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}", f"--descriptor_set_out={target}", name]
    subprocess.run(command, check=True, timeout=30)
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    for message in fresh.message_type:
        for field in message.field:
            field.ClearField("json_name")  # protoc writes it, generated code does not
    committed = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(committed)  # type: ignore[attr-defined]
    for message in committed.message_type:
        for field in message.field:
            field.ClearField("json_name")
    assert committed == fresh, "run python protos/generate.py"


def test_generating_gives_the_modules_and_stubs_that_are_committed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PROTOS / "generate.py"), str(tmp_path)], check=True, timeout=30)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2.py*"))
    kept = sorted(path.relative_to(ROOT / "common") for path in (ROOT / "common/coterie/v1").glob("*_pb2.py*"))
    assert made == kept


def test_the_protos_pass_buf_lint() -> None:
    buf = Path(sys.executable).parent / "buf"
    result = subprocess.run([str(buf), "lint", str(PROTOS)], capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_field_numbers_written_by_hand_are_those_of_the_contract() -> None:
    def number(message: type, field: str) -> int:
        return int(message.DESCRIPTOR.fields_by_name[field].number)  # type: ignore[attr-defined]

    assert fields.TASK_OR_REPLY == number(session_pb2.JoinResponse, "task") == number(session_pb2.JoinRequest, "reply")
    assert number(session_pb2.Task, "parts") == fields.TASK_PARTS
    assert number(session_pb2.Reply, "parts") == fields.REPLY_PARTS
    assert fields.CHUNK == number(session_pb2.JoinResponse, "chunk") == number(session_pb2.JoinRequest, "chunk")
    assert number(session_pb2.Chunk, "data") == fields.CHUNK_DATA


def test_both_ends_name_the_service_of_the_contract() -> None:
    service = session_pb2.DESCRIPTOR.services_by_name["FederationService"]
    assert serve.SERVICE == dial.SERVICE == service.full_name
    assert sorted(method.name for method in service.methods) == ["GetExperiment", "Join"]


def test_the_channel_options_of_both_ends_agree() -> None:
    server, client = dict(serve.OPTIONS), dict(dial.OPTIONS)
    for options in (server, client):
        assert options["grpc.max_receive_message_length"] >= codec.INLINE_BYTES + fields.CHUNK_BYTES
        assert options["grpc.enable_http_proxy"] == 0
    assert client["grpc.max_send_message_length"] <= server["grpc.max_receive_message_length"]
    assert server["grpc.max_send_message_length"] <= client["grpc.max_receive_message_length"]
    assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert server["grpc.so_reuseport"] == 0

from coterie.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("protocol", "run_id", "aggregator", "seq", "durable_seq")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AGGREGATOR_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQ_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    aggregator: str
    seq: int
    durable_seq: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., aggregator: _Optional[str] = ..., seq: _Optional[int] = ..., durable_seq: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("name", "address", "cluster")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    cluster: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., cluster: _Optional[int] = ...) -> None: ...

class PeerList(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class GetExperimentRequest(_message.Message):
    __slots__ = ("protocol", "host", "finding")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FINDING_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    host: str
    finding: Finding
    def __init__(self, protocol: _Optional[int] = ..., host: _Optional[str] = ..., finding: _Optional[_Union[Finding, _Mapping]] = ...) -> None: ...

class GetExperimentResponse(_message.Message):
    __slots__ = ("run_id", "experiment_json", "outcome")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    experiment_json: str
    outcome: str
    def __init__(self, run_id: _Optional[str] = ..., experiment_json: _Optional[str] = ..., outcome: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("hello", "reply", "chunk", "heartbeat", "failure", "book")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BOOK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reply: Reply
    chunk: Chunk
    heartbeat: Heartbeat
    failure: Failure
    book: Book
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., book: _Optional[_Union[Book, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("welcome", "task", "chunk", "heartbeat", "finish", "peers")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    task: Task
    chunk: Chunk
    heartbeat: Heartbeat
    finish: Finish
    peers: PeerList
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., peers: _Optional[_Union[PeerList, _Mapping]] = ...) -> None: ...

class User(_message.Message):
    __slots__ = ("name", "cluster")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    cluster: str
    def __init__(self, name: _Optional[str] = ..., cluster: _Optional[str] = ...) -> None: ...

class Feature(_message.Message):
    __slots__ = ("name", "kind", "column")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    column: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., column: _Optional[str] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("rule", "count", "role", "place")
    RULE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    rule: str
    count: int
    role: str
    place: str
    def __init__(self, rule: _Optional[str] = ..., count: _Optional[int] = ..., role: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "host", "users", "more", "run_id", "last_seq", "numerics", "instance", "aggregator", "model", "schema", "findings", "held", "peer_address")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    AGGREGATOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    host: str
    users: _containers.RepeatedCompositeFieldContainer[User]
    more: bool
    run_id: str
    last_seq: int
    numerics: str
    instance: str
    aggregator: bool
    model: str
    schema: _containers.RepeatedCompositeFieldContainer[Feature]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    held: Held
    peer_address: str
    def __init__(self, protocol: _Optional[int] = ..., host: _Optional[str] = ..., users: _Optional[_Iterable[_Union[User, _Mapping]]] = ..., more: _Optional[bool] = ..., run_id: _Optional[str] = ..., last_seq: _Optional[int] = ..., numerics: _Optional[str] = ..., instance: _Optional[str] = ..., aggregator: _Optional[bool] = ..., model: _Optional[str] = ..., schema: _Optional[_Iterable[_Union[Feature, _Mapping]]] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., peer_address: _Optional[str] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("seq", "attempt", "bytes")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    seq: int
    attempt: int
    bytes: int
    def __init__(self, seq: _Optional[int] = ..., attempt: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Continued(_message.Message):
    __slots__ = ("held", "again")
    HELD_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    held: int
    again: int
    def __init__(self, held: _Optional[int] = ..., again: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run_id", "member_indices", "n_members", "heartbeat_s", "numbers", "clusters")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_INDICES_FIELD_NUMBER: _ClassVar[int]
    N_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    member_indices: _containers.RepeatedScalarFieldContainer[int]
    n_members: int
    heartbeat_s: float
    numbers: _containers.RepeatedScalarFieldContainer[int]
    clusters: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., member_indices: _Optional[_Iterable[int]] = ..., n_members: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., numbers: _Optional[_Iterable[int]] = ..., clusters: _Optional[_Iterable[int]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("seq", "attempt", "stage", "round", "durable_seq", "snapshot", "replay", "resent", "stage_json", "parts", "continued", "reply_held")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQ_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    RESENT_FIELD_NUMBER: _ClassVar[int]
    STAGE_JSON_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    REPLY_HELD_FIELD_NUMBER: _ClassVar[int]
    seq: int
    attempt: int
    stage: int
    round: int
    durable_seq: int
    snapshot: int
    replay: int
    resent: int
    stage_json: str
    parts: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Part]
    continued: Continued
    reply_held: int
    def __init__(self, seq: _Optional[int] = ..., attempt: _Optional[int] = ..., stage: _Optional[int] = ..., round: _Optional[int] = ..., durable_seq: _Optional[int] = ..., snapshot: _Optional[int] = ..., replay: _Optional[int] = ..., resent: _Optional[int] = ..., stage_json: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[_tensor_pb2.Part, _Mapping]]] = ..., continued: _Optional[_Union[Continued, _Mapping]] = ..., reply_held: _Optional[int] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("seq", "attempt", "resent", "durable_seq", "parts", "continued")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESENT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQ_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    attempt: int
    resent: int
    durable_seq: int
    parts: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Part]
    continued: Continued
    def __init__(self, seq: _Optional[int] = ..., attempt: _Optional[int] = ..., resent: _Optional[int] = ..., durable_seq: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[_tensor_pb2.Part, _Mapping]]] = ..., continued: _Optional[_Union[Continued, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("config", "finding")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    FINDING_FIELD_NUMBER: _ClassVar[int]
    config: bool
    finding: Finding
    def __init__(self, config: _Optional[bool] = ..., finding: _Optional[_Union[Finding, _Mapping]] = ...) -> None: ...

class Book(_message.Message):
    __slots__ = ("names", "rows", "n_rows", "link", "of_parent", "user_sets", "events", "peer")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    OF_PARENT_FIELD_NUMBER: _ClassVar[int]
    USER_SETS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    names: str
    rows: bytes
    n_rows: int
    link: str
    of_parent: bool
    user_sets: str
    events: str
    peer: str
    def __init__(self, names: _Optional[str] = ..., rows: _Optional[bytes] = ..., n_rows: _Optional[int] = ..., link: _Optional[str] = ..., of_parent: _Optional[bool] = ..., user_sets: _Optional[str] = ..., events: _Optional[str] = ..., peer: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("outcome", "failed", "finding", "books_held")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FINDING_FIELD_NUMBER: _ClassVar[int]
    BOOKS_HELD_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    failed: bool
    finding: Finding
    books_held: int
    def __init__(self, outcome: _Optional[str] = ..., failed: _Optional[bool] = ..., finding: _Optional[_Union[Finding, _Mapping]] = ..., books_held: _Optional[int] = ...) -> None: ...

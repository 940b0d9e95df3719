from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Value(_message.Message):
    __slots__ = ("boolean", "integer", "large_integer", "number", "text", "list", "tuple", "map")
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    LARGE_INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    boolean: bool
    integer: int
    large_integer: str
    number: float
    text: str
    list: Values
    tuple: Values
    map: Map
    def __init__(self, boolean: _Optional[bool] = ..., integer: _Optional[int] = ..., large_integer: _Optional[str] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., list: _Optional[_Union[Values, _Mapping]] = ..., tuple: _Optional[_Union[Values, _Mapping]] = ..., map: _Optional[_Union[Map, _Mapping]] = ...) -> None: ...

class Values(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Map(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: Value
    value: Value
    def __init__(self, key: _Optional[_Union[Value, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("contract", "software", "environments")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    contract: int
    software: str
    environments: _containers.RepeatedCompositeFieldContainer[Description]
    def __init__(self, contract: _Optional[int] = ..., software: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[Description, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("environment",)
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    def __init__(self, environment: _Optional[str] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("name", "version", "content", "kind", "least_reward", "greatest_reward", "splits", "answerable", "scripted", "answers_per_task", "constant_sum", "alive", "members")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LEAST_REWARD_FIELD_NUMBER: _ClassVar[int]
    GREATEST_REWARD_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    ANSWERABLE_FIELD_NUMBER: _ClassVar[int]
    SCRIPTED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_PER_TASK_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_SUM_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    content: str
    kind: str
    least_reward: float
    greatest_reward: float
    splits: _containers.RepeatedCompositeFieldContainer[SplitDescription]
    answerable: bool
    scripted: bool
    answers_per_task: int
    constant_sum: bool
    alive: _containers.RepeatedScalarFieldContainer[str]
    members: _containers.RepeatedCompositeFieldContainer[Description]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., content: _Optional[str] = ..., kind: _Optional[str] = ..., least_reward: _Optional[float] = ..., greatest_reward: _Optional[float] = ..., splits: _Optional[_Iterable[_Union[SplitDescription, _Mapping]]] = ..., answerable: _Optional[bool] = ..., scripted: _Optional[bool] = ..., answers_per_task: _Optional[int] = ..., constant_sum: _Optional[bool] = ..., alive: _Optional[_Iterable[str]] = ..., members: _Optional[_Iterable[_Union[Description, _Mapping]]] = ...) -> None: ...

class SplitDescription(_message.Message):
    __slots__ = ("split", "source", "size", "skipped")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    split: str
    source: str
    size: int
    skipped: str
    def __init__(self, split: _Optional[str] = ..., source: _Optional[str] = ..., size: _Optional[int] = ..., skipped: _Optional[str] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ("environment", "agents")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    environment: str
    agents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, environment: _Optional[str] = ..., agents: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTaskRequest(_message.Message):
    __slots__ = ("environment", "split", "index")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    environment: str
    split: str
    index: int
    def __init__(self, environment: _Optional[str] = ..., split: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("id", "question", "data", "part", "system", "messages", "rendered")
    ID_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    RENDERED_FIELD_NUMBER: _ClassVar[int]
    id: str
    question: str
    data: Map
    part: str
    system: str
    messages: _containers.RepeatedCompositeFieldContainer[Conversation]
    rendered: bool
    def __init__(self, id: _Optional[str] = ..., question: _Optional[str] = ..., data: _Optional[_Union[Map, _Mapping]] = ..., part: _Optional[str] = ..., system: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Conversation, _Mapping]]] = ..., rendered: _Optional[bool] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class ExtractRequest(_message.Message):
    __slots__ = ("environment", "text")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    text: str
    def __init__(self, environment: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ExtractReply(_message.Message):
    __slots__ = ("answer",)
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    answer: str
    def __init__(self, answer: _Optional[str] = ...) -> None: ...

class ScriptRequest(_message.Message):
    __slots__ = ("environment", "agent", "task", "messages", "seed")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    environment: str
    agent: str
    task: Task
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    seed: int
    def __init__(self, environment: _Optional[str] = ..., agent: _Optional[str] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., seed: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "speaker", "structured")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    SPEAKER_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    speaker: str
    structured: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., speaker: _Optional[str] = ..., structured: _Optional[str] = ...) -> None: ...

class RecordedRequest(_message.Message):
    __slots__ = ("environment", "agent", "task", "turn", "sample")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    environment: str
    agent: str
    task: Task
    turn: int
    sample: int
    def __init__(self, environment: _Optional[str] = ..., agent: _Optional[str] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., turn: _Optional[int] = ..., sample: _Optional[int] = ...) -> None: ...

class TextReply(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("environment", "agents", "task", "pick", "seed", "call_seconds", "grader_seconds")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PICK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GRADER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    environment: str
    agents: _containers.RepeatedScalarFieldContainer[str]
    task: Task
    pick: Pick
    seed: int
    call_seconds: float
    grader_seconds: float
    def __init__(self, environment: _Optional[str] = ..., agents: _Optional[_Iterable[str]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., pick: _Optional[_Union[Pick, _Mapping]] = ..., seed: _Optional[int] = ..., call_seconds: _Optional[float] = ..., grader_seconds: _Optional[float] = ...) -> None: ...

class Pick(_message.Message):
    __slots__ = ("split", "index")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    split: str
    index: int
    def __init__(self, split: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class ResetReply(_message.Message):
    __slots__ = ("session", "version", "scorable", "idle_seconds", "view")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCORABLE_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    session: str
    version: int
    scorable: bool
    idle_seconds: float
    view: View
    def __init__(self, session: _Optional[str] = ..., version: _Optional[int] = ..., scorable: _Optional[bool] = ..., idle_seconds: _Optional[float] = ..., view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("movers", "movers_error", "shown", "shown_errors")
    class ShownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ShownErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MOVERS_FIELD_NUMBER: _ClassVar[int]
    MOVERS_ERROR_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    SHOWN_ERRORS_FIELD_NUMBER: _ClassVar[int]
    movers: _containers.RepeatedScalarFieldContainer[str]
    movers_error: str
    shown: _containers.ScalarMap[str, str]
    shown_errors: _containers.ScalarMap[str, str]
    def __init__(self, movers: _Optional[_Iterable[str]] = ..., movers_error: _Optional[str] = ..., shown: _Optional[_Mapping[str, str]] = ..., shown_errors: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ActRequest(_message.Message):
    __slots__ = ("session", "moves", "final", "answers_allowed", "number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: str
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    final: str
    answers_allowed: int
    number: int
    def __init__(self, session: _Optional[str] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ..., final: _Optional[str] = ..., answers_allowed: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("agent", "text")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    agent: str
    text: str
    def __init__(self, agent: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ActReply(_message.Message):
    __slots__ = ("rewards", "view")
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    rewards: _containers.RepeatedCompositeFieldContainer[Reward]
    view: View
    def __init__(self, rewards: _Optional[_Iterable[_Union[Reward, _Mapping]]] = ..., view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class Reward(_message.Message):
    __slots__ = ("agent", "amount")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    agent: str
    amount: float
    def __init__(self, agent: _Optional[str] = ..., amount: _Optional[float] = ...) -> None: ...

class BatchActRequest(_message.Message):
    __slots__ = ("acts",)
    ACTS_FIELD_NUMBER: _ClassVar[int]
    acts: _containers.RepeatedCompositeFieldContainer[ActRequest]
    def __init__(self, acts: _Optional[_Iterable[_Union[ActRequest, _Mapping]]] = ...) -> None: ...

class BatchActReply(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ActResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ActResult, _Mapping]]] = ...) -> None: ...

class ActResult(_message.Message):
    __slots__ = ("reply", "error")
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reply: ActReply
    error: Error
    def __init__(self, reply: _Optional[_Union[ActReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("session", "agent", "text")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    session: str
    agent: str
    text: str
    def __init__(self, session: _Optional[str] = ..., agent: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("score",)
    SCORE_FIELD_NUMBER: _ClassVar[int]
    score: float
    def __init__(self, score: _Optional[float] = ...) -> None: ...

class OutcomeRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("rewards", "success", "info", "truncated", "roles")
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    rewards: _containers.RepeatedCompositeFieldContainer[Reward]
    success: float
    info: Map
    truncated: bool
    roles: _containers.RepeatedCompositeFieldContainer[Role]
    def __init__(self, rewards: _Optional[_Iterable[_Union[Reward, _Mapping]]] = ..., success: _Optional[float] = ..., info: _Optional[_Union[Map, _Mapping]] = ..., truncated: _Optional[bool] = ..., roles: _Optional[_Iterable[_Union[Role, _Mapping]]] = ...) -> None: ...

class Role(_message.Message):
    __slots__ = ("agent", "role")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    agent: str
    role: str
    def __init__(self, agent: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamQuestion(_message.Message):
    __slots__ = ("number", "reset", "observe", "act", "score", "outcome", "close")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    ACT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    number: int
    reset: ResetRequest
    observe: ObserveRequest
    act: ActRequest
    score: ScoreRequest
    outcome: OutcomeRequest
    close: CloseRequest
    def __init__(self, number: _Optional[int] = ..., reset: _Optional[_Union[ResetRequest, _Mapping]] = ..., observe: _Optional[_Union[ObserveRequest, _Mapping]] = ..., act: _Optional[_Union[ActRequest, _Mapping]] = ..., score: _Optional[_Union[ScoreRequest, _Mapping]] = ..., outcome: _Optional[_Union[OutcomeRequest, _Mapping]] = ..., close: _Optional[_Union[CloseRequest, _Mapping]] = ...) -> None: ...

class StreamAnswer(_message.Message):
    __slots__ = ("number", "reset", "observe", "act", "score", "outcome", "close", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    ACT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    reset: ResetReply
    observe: View
    act: ActReply
    score: ScoreReply
    outcome: Outcome
    close: CloseReply
    error: Error
    def __init__(self, number: _Optional[int] = ..., reset: _Optional[_Union[ResetReply, _Mapping]] = ..., observe: _Optional[_Union[View, _Mapping]] = ..., act: _Optional[_Union[ActReply, _Mapping]] = ..., score: _Optional[_Union[ScoreReply, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., close: _Optional[_Union[CloseReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("name", "settings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: str
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[str] = ...) -> None: ...

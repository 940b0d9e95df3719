from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("question", "messages", "answer")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    question: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    answer: str
    def __init__(self, question: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., answer: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("model", "weights", "results")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    results: _containers.RepeatedCompositeFieldContainer[Result]
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("score", "ungraded")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    UNGRADED_FIELD_NUMBER: _ClassVar[int]
    score: Score
    ungraded: str
    def __init__(self, score: _Optional[_Union[Score, _Mapping]] = ..., ungraded: _Optional[str] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("score", "logit")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOGIT_FIELD_NUMBER: _ClassVar[int]
    score: float
    logit: float
    def __init__(self, score: _Optional[float] = ..., logit: _Optional[float] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "weights", "about")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    weights: str
    about: str
    def __init__(self, name: _Optional[str] = ..., weights: _Optional[str] = ..., about: _Optional[str] = ...) -> None: ...

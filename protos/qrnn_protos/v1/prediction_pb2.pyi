from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]

class VersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_STATE_UNSPECIFIED: _ClassVar[VersionState]
    VERSION_STATE_LOADING: _ClassVar[VersionState]
    VERSION_STATE_SERVING: _ClassVar[VersionState]
    VERSION_STATE_DRAINING: _ClassVar[VersionState]
    VERSION_STATE_FAILED: _ClassVar[VersionState]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_SERVING: _ClassVar[ReplicaState]
    REPLICA_STATE_GIVEN_UP: _ClassVar[ReplicaState]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT64: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
VERSION_STATE_UNSPECIFIED: VersionState
VERSION_STATE_LOADING: VersionState
VERSION_STATE_SERVING: VersionState
VERSION_STATE_DRAINING: VersionState
VERSION_STATE_FAILED: VersionState
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_SERVING: ReplicaState
REPLICA_STATE_GIVEN_UP: ReplicaState

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("model", "version", "values", "lengths", "state", "return_state", "request_id", "output_dtype")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RETURN_STATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    values: Tensor
    lengths: Tensor
    state: Tensor
    return_state: bool
    request_id: str
    output_dtype: DataType
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., values: _Optional[_Union[Tensor, _Mapping]] = ..., lengths: _Optional[_Union[Tensor, _Mapping]] = ..., state: _Optional[_Union[Tensor, _Mapping]] = ..., return_state: bool = ..., request_id: _Optional[str] = ..., output_dtype: _Optional[_Union[DataType, str]] = ...) -> None: ...

class PredictResponse(_message.Message):
    __slots__ = ("model", "version", "rows", "output", "output_lengths", "state", "errors", "timing", "request_id", "device", "engine")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    rows: Tensor
    output: Tensor
    output_lengths: Tensor
    state: Tensor
    errors: _containers.RepeatedCompositeFieldContainer[RowError]
    timing: Timing
    request_id: str
    device: str
    engine: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., rows: _Optional[_Union[Tensor, _Mapping]] = ..., output: _Optional[_Union[Tensor, _Mapping]] = ..., output_lengths: _Optional[_Union[Tensor, _Mapping]] = ..., state: _Optional[_Union[Tensor, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., request_id: _Optional[str] = ..., device: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "code", "message", "field", "expected", "got", "timestep")
    ROW_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    TIMESTEP_FIELD_NUMBER: _ClassVar[int]
    row: int
    code: int
    message: str
    field: str
    expected: str
    got: str
    timestep: int
    def __init__(self, row: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., expected: _Optional[str] = ..., got: _Optional[str] = ..., timestep: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_s", "compute_s", "batch_rows", "batch_timesteps", "decode_s", "encode_s", "upload_s", "download_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TIMESTEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    compute_s: float
    batch_rows: int
    batch_timesteps: int
    decode_s: float
    encode_s: float
    upload_s: float
    download_s: float
    def __init__(self, queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., batch_rows: _Optional[int] = ..., batch_timesteps: _Optional[int] = ..., decode_s: _Optional[float] = ..., encode_s: _Optional[float] = ..., upload_s: _Optional[float] = ..., download_s: _Optional[float] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "max_message_bytes", "max_request_timesteps", "versions")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TIMESTEPS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    max_message_bytes: int
    max_request_timesteps: int
    versions: _containers.RepeatedCompositeFieldContainer[VersionStatus]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., max_message_bytes: _Optional[int] = ..., max_request_timesteps: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[VersionStatus, _Mapping]]] = ...) -> None: ...

class VersionStatus(_message.Message):
    __slots__ = ("model", "version", "state", "error")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    state: VersionState
    error: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[VersionState, str]] = ..., error: _Optional[str] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "version", "takes_ids", "input_size", "vocabulary_size", "output_name", "output_size", "output_per_timestep", "state_size", "engine", "devices", "weights_sha256", "dtype", "replicas")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TAKES_IDS_FIELD_NUMBER: _ClassVar[int]
    INPUT_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_SIZE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_PER_TIMESTEP_FIELD_NUMBER: _ClassVar[int]
    STATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    takes_ids: bool
    input_size: int
    vocabulary_size: int
    output_name: str
    output_size: int
    output_per_timestep: bool
    state_size: int
    engine: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    weights_sha256: str
    dtype: DataType
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., takes_ids: bool = ..., input_size: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., output_name: _Optional[str] = ..., output_size: _Optional[int] = ..., output_per_timestep: bool = ..., state_size: _Optional[int] = ..., engine: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., weights_sha256: _Optional[str] = ..., dtype: _Optional[_Union[DataType, str]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("device", "state", "restarts", "last_error")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    device: str
    state: ReplicaState
    restarts: int
    last_error: str
    def __init__(self, device: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., restarts: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

"""The trainer's side of vLLM's weight transfer, which moves a round's weights from GPU memory to the engines
and never to a disk.

``ipc`` (the engine runs on the trainer's own GPUs) and ``nccl`` (it has its own GPUs) are vLLM's own trainer
engines. They reach the engines through vLLM's four calls (``VLLMWeightSyncClient``). All ranks go through
the weights together, and the first rank of each node sends them to that node's engines: every node has a
group of ``nccl`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from common.ports import free_port
from common.worker_process import WorkerError
from config.schema_sampler import SamplerConfig


class Client(Protocol):
    """The calls that vLLM's trainer engines make to an engine. They are those of vLLM's
    ``VLLMWeightSyncClient``, a structural protocol."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Transfer(Protocol):
    """A connection that sends weights to the engines. It is made again whenever they are started."""

    def send_weights(self) -> None:
        """Send all weights. Every rank calls it. Raises WorkerError if the client does."""

    def shutdown(self) -> None:
        """Release what belongs to the connection, whether or not the engines are still there."""


@dataclass(frozen=True)
class Meta:
    """Name, dtype and shape of one weight, as in vLLM's ``ParamMeta``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The weights in the form that an engine needs. Of vLLM's ``WeightSource``, these two methods are the
    ones that vLLM's engines use."""

    def __init__(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """``weights``: iterates over all weights from the beginning, on every rank in step, because it
        gathers them."""
        self._weights = weights
        self._metadata: list[Meta] | None = None
        self.without: frozenset[str] = frozenset()
        """names of weights that the engine has no place for"""

    def metadata(self) -> list[Meta]:
        """Return the metadata of the weights that iteration gives. The first call iterates over all
        weights."""
        if self._metadata is None:
            self._metadata = [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._metadata

    def largest(self) -> int:
        """Return the bytes of the largest weight. Every rank calls it, as it iterates over all weights."""
        return max((tensor.numel() * tensor.element_size() for _, tensor in self), default=0)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self._weights() if name not in self.without)


class DeferredErrors:
    """A client that holds its first error back until all weights have been iterated over. A rank that left
    midway would leave the others waiting in a collective for ever."""

    def __init__(self, client: Client | None, version: str = "") -> None:
        """``client``: None on ranks that make no calls to engines. ``version``: the version that the weights
        get once they are all there. ``silent``: this node's engines have these weights, so they get no
        calls while others are sent them."""
        self._client, self.version, self.silent = client, version, False
        self._error: WorkerError | None = None
        self.release: Callable[[], None] = _nothing
        """called at an error, in the thread that meets it: ends what waits for the engines meanwhile"""

    @property
    def closed(self) -> bool:
        """Whether no call reaches the engines: ``silent``, or there is an error that has not been raised
        yet."""
        return self.silent or self._error is not None

    def check(self) -> None:
        """Raise the first error, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(lambda client: client.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._call(lambda client: client.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        self._call(lambda client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(lambda client: client.finish_weight_update(weight_version or self.version))

    def _call(self, ask: Callable[[Client], None]) -> None:
        if self._client is None or self.closed:
            return
        try:
            ask(self._client)
        except WorkerError as error:
            self._error = error
            self.release()


def _nothing() -> None:
    """Do nothing."""


def make_transfer(
    backend: str, client: Client, source: WeightSource, rank: int, workers: int, largest: int
) -> Transfer:
    """Return the transfer to a node's engines that have just been started. Every rank of the node calls it.
    ``rank``: within the node; the first one sends. ``workers``: number of workers of the node's engines
    together. ``largest``: as ``trainer_info``. Raises WorkerError if the client does, and what vLLM
    raises."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # seconds to import
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    info = trainer_info(backend, rank, workers, largest)
    stops = backend == "nccl"
    engine = stoppable(NCCLTrainerWeightTransferEngine) if stops else WeightTransferTrainerFactory
    transfer: Transfer = engine.trainer_init(info, client=client, source=source)
    return transfer


def stoppable(engine: Any) -> Any:
    """Return a subclass of ``engine``, vLLM's trainer engine of NCCL, that broadcasts only to engines that
    receive.

    A broadcast waits for its receivers without end. vLLM's engine therefore raises if the request to receive
    has failed before; a ``DeferredErrors`` holds that error back, and says that it has one. Then the weights
    are only gone through, in step with the other ranks. If an engine fails later, the group is aborted, which
    ends the broadcast that waits for it.
    """

    class Stoppable(engine):  # type: ignore[misc]
        def _broadcast(self, source: Any, meta: Any) -> None:
            if not self.is_sender:
                super()._broadcast(source, meta)
                return
            self.client.release = self.model_update_group.destroy
            weights = iter(source)
            try:
                if not self.client.closed:
                    super()._broadcast(weights, meta)
            except RuntimeError:
                if not self.client.closed:  # an aborted group raises
                    raise
            finally:
                for _ in weights:  # the other ranks gather with this one
                    pass
                self.client.release = _nothing

    return Stoppable


def trainer_info(backend: str, rank: int, workers: int, largest: int = 0) -> Any:
    """Return the settings of vLLM's trainer engine for ``backend``. Weights are sent in parts of bounded size
    (``packed``). ``largest``: bytes of the largest weight, which must fit in one part of ``ipc``."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        room = max(largest, IPCTrainerInitInfo.packed_buffer_size_bytes)
        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=room)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        rank=rank,
        master_address="127.0.0.1" if rank == 0 else "",
        master_port=free_port() if rank == 0 else 0,
        world_size=1 + workers,
        packed=True,
    )


def chosen(config: SamplerConfig, device: torch.device) -> str:
    """Return the backend that ``sampler.weight_transfer`` means on this device."""
    if config.weight_transfer != "auto":
        return config.weight_transfer
    if device.type != "cpu":
        return "ipc" if config.shares_devices else "nccl"
    return "disk"

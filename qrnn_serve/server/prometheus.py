"""The engine's counts as Prometheus metrics over HTTP, read when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.engine.pool import PoolSnapshot
from qrnn_serve.engine.replica_status import ReplicaState
from qrnn_serve.server.front_ends import FrontEnds
from qrnn_serve.server.lifecycle import LocalModel, State, VersionStatus
from qrnn_serve.server.stages import BOUNDS_S, STAGES

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_ENDS = ("scored", "refused", "expired", "cancelled", "failed")


class PrometheusExporter:
    """Serves the metrics of all models until it is closed.

    Attributes:
        port: The port it listens on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        models: Callable[[], Sequence[LocalModel]],
        statuses: Callable[[], Sequence[VersionStatus]],
        front_ends: FrontEnds | None,
    ) -> None:
        """Start listening. `front_ends` is None where the server takes calls itself.

        Raises:
            ConfigError: The library is not installed, or the address cannot be listened on.
        """
        try:
            import prometheus_client
        except ModuleNotFoundError as error:
            raise ConfigError(
                "--prometheus-port needs a library that is not installed: "
                "pip install prometheus-client"
            ) from error
        registry = prometheus_client.CollectorRegistry()
        registry.register(_ServerCollector(models, statuses, front_ends))
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, addr=host, registry=registry
            )
        except OSError as error:
            raise ConfigError(
                f"prometheus_port: cannot listen on {host}:{port}: {error}"
            ) from error
        self.port = self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _ServerCollector:
    def __init__(
        self,
        models: Callable[[], Sequence[LocalModel]],
        statuses: Callable[[], Sequence[VersionStatus]],
        front_ends: FrontEnds | None,
    ) -> None:
        self._front_ends = front_ends
        self._models = models
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now, each with the samples of all models."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._front_ends is not None:
            alive, restarts = self._front_ends.alive, self._front_ends.restarts
            yield GaugeMetricFamily("qrnn_front_ends_alive", "Processes that take calls.", alive)
            yield CounterMetricFamily(
                "qrnn_front_end_restarts", "Starts of such processes that had ended.", restarts
            )
        models = self._models()
        families: dict[str, Metric] = {}
        for model in models:
            for metric in _Collector(model.identity.name, model.pool.snapshot).collect():
                families.setdefault(metric.name, metric)
                if families[metric.name] is not metric:
                    families[metric.name].samples += metric.samples
        yield from families.values()
        yield _stages(models)
        versions = GaugeMetricFamily(
            "qrnn_model_version",
            "1 for the state that a version is in.",
            labels=["model", "version", "state"],
        )
        for status in self._statuses():
            for state in State:
                labels = [status.model, status.version, state.name.lower()]
                versions.add_metric(labels, float(status.state is state))
        yield versions


def _stages(models: Sequence[LocalModel]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(
        "qrnn_stage_seconds", "Seconds of requests, by stage.", labels=["model", "stage"]
    )
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for model in models:
        for stage in STAGES:
            buckets = list(zip(bounds, model.stages.cumulative(stage), strict=True))
            family.add_metric([model.identity.name, stage], buckets, model.stages.sum_s(stage))
    return family


class _Collector:
    def __init__(self, model: str, read: Callable[[], PoolSnapshot]) -> None:
        self._model = model
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._read()
        depth, counts = snapshot.depth, snapshot.counts
        gauges = {
            "queue_requests": ("Requests that wait.", depth.requests),
            "queue_timesteps": ("Timesteps that wait.", depth.timesteps),
            "queue_bytes": ("Bytes that wait.", depth.nbytes),
            "queue_oldest_seconds": ("Age of the oldest request that waits.", depth.oldest_s),
            "replicas_alive": ("Replicas that can score.", snapshot.replicas_alive),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"qrnn_{name}", text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        sums = {
            "batches": ("Batches that ran.", counts.batches),
            "rows": ("Rows in them.", counts.rows),
            "timesteps": ("Timesteps of those rows.", counts.timesteps),
            "padded_timesteps": ("Timesteps of padding.", counts.padded_timesteps),
            "graph_replays": ("Batches that were replays of CUDA graphs.", counts.graph_replays),
            "batch_seconds": ("Seconds that replicas spent on batches.", counts.batch_s),
            "predicted_seconds": ("Seconds that were expected of batches.", counts.predicted_s),
            "queue_seconds": ("Seconds that scored requests waited.", counts.queue_s),
            "replica_restarts": ("Starts of replicas that had failed.", counts.restarts),
            "requests_retried": ("Requests tried again after a lost replica.", counts.retried),
        }
        for name, (text, value) in sums.items():
            counter = CounterMetricFamily(f"qrnn_{name}", text, labels=["model"])
            counter.add_metric([self._model], value)
            yield counter
        yield from self._of_replicas(snapshot)
        yield from self._of_stages(snapshot)
        requests = CounterMetricFamily("qrnn_requests", "By end.", labels=["model", "end"])
        for end in _ENDS:
            requests.add_metric([self._model, end], getattr(counts, end))
        yield requests

    def _of_replicas(self, snapshot: PoolSnapshot) -> Iterator[Metric]:
        """How each replica is, and what its batches are expected to take."""
        from prometheus_client.core import GaugeMetricFamily

        states = GaugeMetricFamily(
            "qrnn_replica_state",
            "1 for the state that a replica is in.",
            labels=["model", "replica", "device", "state"],
        )
        for number, replica in enumerate(snapshot.replicas):
            for state in ReplicaState:
                labels = [self._model, str(number), replica.device, state.value]
                states.add_metric(labels, float(replica.state is state))
        yield states
        budget = GaugeMetricFamily(
            "qrnn_batch_budget_timesteps",
            "Timesteps of a batch of rows of 64 timesteps that takes its target time.",
            labels=["model", "replica", "device"],
        )
        cost = GaugeMetricFamily(
            "qrnn_cost_seconds",
            "Terms of the predicted seconds of a batch.",
            labels=["model", "replica", "device", "term"],
        )
        graphs = GaugeMetricFamily(
            "qrnn_graphs",
            "CUDA graphs that a replica had after its last batch.",
            labels=["model", "replica", "device"],
        )
        for number, replica in enumerate(snapshot.costs):
            labels = [self._model, str(number), replica.device]
            budget.add_metric(labels, replica.budget_timesteps)
            graphs.add_metric(labels, replica.graphs)
            for term, value in dataclasses.asdict(replica.terms).items():
                cost.add_metric([*labels, term], value)
        yield budget
        yield cost
        yield graphs

    def _of_stages(self, snapshot: PoolSnapshot) -> Iterator[Metric]:
        """How busy the stages of placed replicas are, and what they hold."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = ["model", "replica", "stage", "device", "layers"]
        busy = CounterMetricFamily(
            "qrnn_stage_busy_seconds", "Seconds that a stage worked on batches.", labels=names
        )
        weights = GaugeMetricFamily(
            "qrnn_stage_weight_bytes", "Size of a stage's weights.", labels=names
        )
        by_host = GaugeMetricFamily(
            "qrnn_stage_copies_by_host",
            "1 where a stage's input goes through the host, since direct copies are broken.",
            labels=names,
        )
        for replica, stages in enumerate(snapshot.stages):
            for number, stage in enumerate(stages):
                labels = [self._model, str(replica), str(number), stage.device, stage.layers]
                busy.add_metric(labels, stage.busy_s)
                weights.add_metric(labels, stage.weight_bytes)
                by_host.add_metric(labels, float(stage.copies_by_host))
        yield busy
        yield weights
        yield by_host

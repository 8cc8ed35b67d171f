"""Models and versions that come and go while a server answers calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import weakref

import grpc
import numpy as np
import pytest

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.server.app import Repository, Server
from qrnn_serve.server.config import ServerConfig
from support.scorers import SumScorer
from support.servers import Running, array, request

ONE = np.ones((1, 2), np.float32)


class Scaled(SumScorer):
    """Scores as SumScorer, times a factor that stands in its file."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def score(self, rows):
        scored = super().score(rows)
        scored.output[...] *= self.factor
        return scored


class Files:
    """A repository whose artefacts are JSON, and what they were loaded as."""

    def __init__(self, folder):
        self.folder = folder
        self.scorers = []

    def write(self, model, version, factor=None, text=None):
        folder = self.folder / model / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x.pt").write_text(json.dumps({"factor": factor}) if text is None else text)

    def loaders_of(self, path):
        def load():
            try:
                scorer = Scaled(json.loads(path.read_text())["factor"])
            except ValueError as error:
                raise ArtefactError(f"{path}: damaged") from error
            if scorer.factor == 13:
                raise ZeroDivisionError("whatever a library raises")
            if scorer.factor == 14:
                scorer.dead = True
            self.scorers.append(scorer)
            return scorer

        return [load]


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@contextlib.asynccontextmanager
async def serving(files, **settings):
    settings = {"port": 0, "watch_s": 0.02, "restart_wait_s": 0.01} | settings
    server = Server(
        ServerConfig(**settings), Repository(folder=files.folder, loaders_of=files.loaders_of)
    )
    try:
        await server.start()
        target = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(target) as channel:
            yield Running(
                server, target, channel, prediction_pb2_grpc.PredictionServiceStub(channel)
            )
    finally:
        for scorer in files.scorers:
            scorer.gate.set()
        await server.stop(grace_s=5)


async def states(running):
    reply = await running.stub.ListModels(pb.ListModelsRequest())
    return {
        (v.model, v.version): pb.VersionState.Name(v.state).removeprefix("VERSION_STATE_")
        for v in reply.versions
    }


async def until(condition):
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


async def score(running, model=""):
    reply = await running.stub.Predict(request([ONE], model=model))
    return float(array(reply.output)[0, 0]), reply.version


async def test_repository_serves_the_highest_version_of_every_model(files):
    """Two models, one with versions 2 and 10: both are served, listed and healthy by name."""
    files.write("a", 2, 2.0)
    files.write("a", 10, 10.0)
    files.write("b", 1, 3.0)
    async with serving(files) as running:
        scores = [await score(running, "a"), await score(running, "b")]
        listed = await running.stub.ListModels(pb.ListModelsRequest())
        health = [await running.health(name) for name in ("", "a", "b")]

    assert scores == [(10.0, "10"), (3.0, "1")]
    assert [(m.name, m.version) for m in listed.models] == [("a", "10"), ("b", "1")]
    assert health == ["SERVING"] * 3


async def test_new_version_takes_over_without_a_call_lost(files):
    """Under steady traffic each reply comes from one version, which it names, and none fails."""
    files.write("a", 1, 1.0)
    replies, done = [], asyncio.Event()

    async def traffic(running):
        while not done.is_set():
            replies.append(await score(running))

    async with serving(files) as running:
        callers = [asyncio.create_task(traffic(running)) for _ in range(4)]
        for version in range(2, 7):
            files.write("a", version, float(version))

            async def serves(version=version):
                return replies and replies[-1][1] == str(version)

            await until(serves)
        done.set()
        await asyncio.gather(*callers)

        async def drained():
            return await states(running) == {("a", "6"): "SERVING"}

        await until(drained)

    assert all(value == float(version) for value, version in replies)
    assert [scorer.closed for scorer in files.scorers] == [True] * 6
    assert {version for _, version in replies} >= {"1", "6"}


async def test_replaced_version_is_forgotten_with_all_that_it_held(files):
    """Nothing keeps the pool of a version that was replaced, and so none of its memory."""
    files.write("a", 1, 1.0)
    async with serving(files) as running:
        replaced = weakref.ref(running.server._models.serving("a").pool)
        await score(running)
        files.write("a", 2, 2.0)

        async def drained():
            return await states(running) == {("a", "2"): "SERVING"}

        await until(drained)
        gc.collect()
        assert replaced() is None


@pytest.mark.parametrize("bad", ["{", '{"factor": 13}', '{"factor": 14}', '{"other": 1}'])
async def test_bad_new_version_leaves_the_old_one_serving(files, bad, caplog):
    """A file that does not load or fails its warm-up is reported; the version before serves on."""
    files.write("a", 1, 1.0)
    async with serving(files) as running:
        files.write("a", 2, text=bad)

        async def failed():
            return (await states(running)).get(("a", "2")) == "FAILED"

        await until(failed)
        loads = len(files.scorers)
        await asyncio.sleep(0.2)
        value = await score(running)
        reply = await running.stub.ListModels(pb.ListModelsRequest())
        mended = loads == len(files.scorers)
        files.write("a", 2, 2.0)

        async def serves():
            return await states(running) == {("a", "2"): "SERVING"}

        await until(serves)
        after = await score(running)

    assert value == (1.0, "1")
    assert [v.error for v in reply.versions if v.version == "2"] != [""]
    assert "cannot load model='a' version='2'" in caplog.text
    assert mended, "it was not tried again while its files were the same"
    assert after == (2.0, "2")


async def test_running_call_ends_on_the_version_that_it_began_with(files):
    """A call that is being scored when its version is replaced gets its scores from it."""
    files.write("a", 1, 1.0)
    async with serving(files) as running:
        [old] = files.scorers
        while old.entered.acquire(blocking=False):
            pass
        old.gate.clear()
        call = asyncio.ensure_future(score(running))
        assert await asyncio.to_thread(old.entered.acquire, timeout=10)
        files.write("a", 2, 2.0)

        async def switched():
            return (await states(running)).get(("a", "1")) == "DRAINING"

        await until(switched)
        new = await score(running)
        closed_before = old.closed
        old.gate.set()
        value = await call

    assert (value, new) == ((1.0, "1"), (2.0, "2"))
    assert not closed_before


async def test_version_that_is_still_written_is_not_loaded(files):
    """Files that change between two looks are left alone, however long that takes."""
    files.write("a", 1, 1.0)
    async with serving(files, watch_s=0.05) as running:
        for number in range(60):
            files.write("a", 2, text="{" + " " * number)
            await asyncio.sleep(0.01)
        unread = await states(running)
        files.write("a", 2, 2.0)

        async def serves():
            return (await score(running))[1] == "2"

        await until(serves)

    assert unread == {("a", "1"): "SERVING"}


async def test_model_goes_with_its_folder_and_falls_back_with_its_version(files):
    """Without its newest version a model serves the one before; without any it is gone."""
    for version in (1, 2):
        files.write("a", version, float(version))
    files.write("b", 1, 5.0)
    async with serving(files) as running:
        shutil.rmtree(files.folder / "a" / "2")

        async def fell_back():
            return (await score(running, "a"))[1] == "1"

        await until(fell_back)
        shutil.rmtree(files.folder / "a")

        async def gone():
            return ("a", "1") not in await states(running)

        await until(gone)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await score(running, "a")
        health = [await running.health(name) for name in ("", "a", "b")]
        others = await score(running, "b")

    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    assert health == ["SERVING", "NOT_SERVING", "SERVING"]
    assert others == (5.0, "1")


async def test_start_falls_back_and_names_models_without_a_good_version(files):
    """At the start a bad newest version is passed over; a model with none stops the start."""
    files.write("a", 1, 1.0)
    files.write("a", 2, text="{")
    async with serving(files) as running:
        value = await score(running)
        listed = await states(running)
    files.write("b", 1, text="{")
    with pytest.raises(ConfigError, match=r"no version of b can be served: b version 1: .*damaged"):
        async with serving(files):
            pass

    assert value == (1.0, "1")
    assert listed == {("a", "1"): "SERVING", ("a", "2"): "FAILED"}


async def test_empty_repository_serves_and_waits(files):
    """A server on an empty folder is ready, lists nothing, and serves what comes."""
    async with serving(files) as running:
        health = await running.health("")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await score(running)
        files.write("a", 1, 4.0)

        async def serves():
            return await states(running) == {("a", "1"): "SERVING"}

        await until(serves)
        value, named = await score(running), await running.health("a")

    assert health == named == "SERVING"
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    assert value == (4.0, "1")


async def test_models_beyond_the_memory_cap_say_how_many_bytes_are_missing(files):
    """A version that does not fit beside the loaded ones is refused with the missing bytes."""
    files.write("a", 1, 1.0)
    size = os.path.getsize(files.folder / "a" / "1" / "x.pt")
    async with serving(files, model_memory_bytes=2 * size + 3) as running:
        files.write("a", 2, 2.0)

        async def second():
            return await states(running) == {("a", "2"): "SERVING"}

        await until(second)
        files.write("b", 1, text=json.dumps({"factor": 3.0}) + " " * 10)

        async def refused():
            return (await states(running)).get(("b", "1")) == "FAILED"

        await until(refused)
        reply = await running.stub.ListModels(pb.ListModelsRequest())
        value = await score(running)

    [error] = [v.error for v in reply.versions if v.model == "b"]
    assert f"needs {size + 10} bytes" in error
    assert "7 bytes are missing" in error
    assert "a version 2" in error
    assert value == (2.0, "2")


async def load(running, model, version=""):
    return await running.stub.LoadModel(pb.LoadModelRequest(model=model, version=version))


async def test_models_are_loaded_and_unloaded_by_call_where_that_is_allowed(files):
    """With model_control rpc, calls load any version and unload; the folder is not watched."""
    files.write("a", 1, 1.0)
    async with serving(files, model_control="rpc") as running:
        files.write("a", 2, 2.0)
        files.write("b", 1, text="{")
        await asyncio.sleep(0.2)
        unwatched = await score(running)
        loaded = await load(running, "a")
        newest = await score(running)
        await load(running, "a", "1")
        older = await score(running)
        codes = []
        for model, version in (("b", ""), ("a", "7"), ("c", "")):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await load(running, model, version)
            codes.append(failed.value.code().name)
        still = await score(running)
        await running.stub.UnloadModel(pb.UnloadModelRequest(model="a"))
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await score(running, "a")
        with pytest.raises(grpc.aio.AioRpcError) as twice:
            await running.stub.UnloadModel(pb.UnloadModelRequest(model="a"))

    assert (unwatched, newest, older, still) == ((1.0, "1"), (2.0, "2"), (1.0, "1"), (1.0, "1"))
    assert (loaded.model.name, loaded.model.version) == ("a", "2")
    assert codes == ["FAILED_PRECONDITION", "NOT_FOUND", "NOT_FOUND"]
    assert gone.value.code() == twice.value.code() == grpc.StatusCode.NOT_FOUND
    assert all(scorer.closed for scorer in files.scorers)


async def test_models_are_not_changed_by_call_unless_allowed(files):
    """By default LoadModel and UnloadModel are refused, and the message names the setting."""
    files.write("a", 1, 1.0)
    async with serving(files) as running:
        with pytest.raises(grpc.aio.AioRpcError) as load_refused:
            await load(running, "a")
        with pytest.raises(grpc.aio.AioRpcError) as unload_refused:
            await running.stub.UnloadModel(pb.UnloadModelRequest(model="a"))

    for refused in (load_refused, unload_refused):
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "--model-control rpc" in refused.value.details()


async def test_server_outlives_one_of_its_models(files):
    """A model whose replicas are given up is FAILED, not started from new files; others serve."""
    files.write("a", 1, 1.0)
    files.write("b", 1, 2.0)
    async with serving(files, model_control="none") as running:
        files.write("a", 1, 5.0)
        files.scorers[0].dead = True
        with pytest.raises(grpc.aio.AioRpcError):
            await score(running, "a")

        async def failed():
            return (await states(running)).get(("a", "1")) == "FAILED"

        await until(failed)
        health = [await running.health(name) for name in ("", "a", "b")]
        value = await score(running, "b")

    assert health == ["SERVING", "NOT_SERVING", "SERVING"]
    assert value == (2.0, "1")

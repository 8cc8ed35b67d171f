"""Which event loop runs the server, and what is said when it is not there."""

from __future__ import annotations

import asyncio
import importlib.util
import sys

import pytest

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.server.event_loop import run

UVLOOP = importlib.util.find_spec("uvloop") is not None


async def loop_module():
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_asyncio_is_asyncio():
    """Asked for by name, it is used whether uvloop is installed or not."""
    assert run(loop_module(), "asyncio") == "asyncio"


@pytest.mark.skipif(not UVLOOP, reason="needs uvloop: pip install uvloop")
@pytest.mark.parametrize("kind", ["auto", "uvloop"])
def test_uvloop_where_it_is_installed(kind):
    """It is what `auto` means where it is there."""
    assert run(loop_module(), kind) == "uvloop"


def test_without_uvloop(monkeypatch):
    """`auto` goes on with asyncio; `uvloop` says what to install."""
    monkeypatch.setitem(sys.modules, "uvloop", None)

    assert run(loop_module(), "auto") == "asyncio"
    with pytest.raises(ConfigError, match=r"pip install 'qrnn-serve\[uvloop\]'"):
        run(loop_module(), "uvloop")

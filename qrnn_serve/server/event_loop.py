"""Which event loop runs a process of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.server.config import EventLoop

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def run(main: Coroutine[Any, Any, Result], kind: EventLoop) -> Result:
    """Run to the end; `kind` "auto" is uvloop where it is installed.

    Raises:
        ConfigError: uvloop was asked for and is not installed.
    """
    if kind == "asyncio":
        return asyncio.run(main)
    try:
        import uvloop  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        if kind == "uvloop":
            main.close()
            raise ConfigError(
                "event_loop: uvloop is not installed: pip install 'qrnn-serve[uvloop]'"
            ) from None
        logger.info("event loop: asyncio; pip install 'qrnn-serve[uvloop]' for a faster one")
        return asyncio.run(main)
    logger.info("event loop: uvloop %s", uvloop.__version__)
    return uvloop.run(main)

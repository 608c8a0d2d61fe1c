"""Hugging Face's hub, where there is a network."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


def is_offline() -> bool:
    """Whether the hub has no address here: it would be asked again and again, for most of a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


@contextmanager
def asked() -> Iterator[None]:
    """It is asked in here, or where there is none only what it has left on the disk; it says nothing itself."""
    from huggingface_hub import constants

    logger, was = logging.getLogger("huggingface_hub"), constants.HF_HUB_OFFLINE
    level = logger.level
    logger.setLevel(logging.ERROR)
    constants.HF_HUB_OFFLINE = is_offline()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was
        logger.setLevel(level)

"""Messages between processes: typed (msgspec), versioned, bounded in size, encoded as MessagePack.

Unknown fields are ignored, unknown versions refused. Vectors travel as little-endian float32 bytes, row-major, so that
the router can pass them on without numpy.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

VERSION = 1


MAX_MESSAGE_BYTES = 8 * 1024 * 1024


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base: `v` is the message's version."""

    v: int = VERSION


class BadMessage(ValueError):
    """The error for bytes that are no message of this version; it names the expected type."""


_encoder = msgspec.msgpack.Encoder()


M = TypeVar("M", bound=Message)


_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    """Encode any message; ValueError if it exceeds MAX_MESSAGE_BYTES."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{type(message).__name__} of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are allowed"
        )
    return data


def _checked(decoder: msgspec.msgpack.Decoder[Any], name: str, data: bytes) -> Any:
    try:
        message = decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise BadMessage(f"{name}: {error}") from error
    if message.v != VERSION:
        raise BadMessage(f"{name}: version {message.v}, expected {VERSION}")
    return message


def decode(data: bytes, cls: type[M]) -> M:
    """Decode one message of a known type; BadMessage for other bytes."""
    decoder = _decoders.get(cls)
    if decoder is None:
        decoder = _decoders[cls] = msgspec.msgpack.Decoder(cls)
    message: M = _checked(decoder, cls.__name__, data)
    return message

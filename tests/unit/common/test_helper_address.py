"""Where a helper meets its gpu_worker: what the setting may say, and what is shown of it."""

from __future__ import annotations

import pytest

from common.config import WorkerConfig
from common.errors import ConfigError
from common.registry.processes import PRIVATE, shown_settings
from common.types.helper_address import HelperAddress

SECRET = "s" * 16


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", None),
        ("host.sock", HelperAddress("/data/host.sock")),
        ("/run/host.sock", HelperAddress("/run/host.sock")),
        ("tcp://10.0.0.7:7070", HelperAddress("", "10.0.0.7", 7070, SECRET)),
        ("tcp://gpu-1.internal:7070", HelperAddress("", "gpu-1.internal", 7070, SECRET)),
        ("tcp://[::1]:7070", HelperAddress("", "::1", 7070, SECRET)),
    ],
)
def test_an_address(setting: str, expected: HelperAddress | None) -> None:
    """A path lies in the data directory; the address of TCP reads as it was written."""
    found = HelperAddress.of("/data", setting, SECRET)

    assert found == expected
    assert SECRET not in repr(found)
    if setting.startswith("tcp"):
        assert str(found) == setting


@pytest.mark.parametrize(
    "setting",
    [
        "tcp://", "tcp://host", "tcp://host:0", "tcp://host:x", "tcp://host:70000", "tcp://:7070", "tcp://[::1:7070",
        "tcp://host:7070/path", "tcp://user@host:7070",
    ],
)  # fmt: skip
def test_no_address(setting: str) -> None:
    """What names no host and port stops the start."""
    with pytest.raises(ConfigError, match=r"SPILLWAY_HOST_SOCKET .* expected tcp://HOST:PORT"):
        HelperAddress.of("/data", setting, SECRET)


@pytest.mark.parametrize("secret", ["", "s" * 15])
def test_a_secret_is_needed(secret: str) -> None:
    """Without a secret of some length nobody listens on TCP; the error does not repeat it."""
    with pytest.raises(ConfigError, match="SPILLWAY_HOST_SECRET has") as error:
        HelperAddress.of("/data", "tcp://host:7070", secret)
    assert "sss" not in str(error.value)


@pytest.mark.parametrize(("setting", "kind"), [("a/b.sock", "unix"), ("tcp://h:7070", "tcp")])
def test_the_mesh_shows_the_kind(setting: str, kind: str) -> None:
    """Whoever holds a key learns which channel is set, and neither address nor secret."""
    config = WorkerConfig(host_socket=setting, host_secret=SECRET)

    assert shown_settings(config) == {"SPILLWAY_HOST_SOCKET": kind}
    assert {"host_socket", "host_secret"} <= PRIVATE

"""Fixtures shared with the integration tests of the same room."""

from tests.integration.kv_store.conftest import *  # noqa: F403 - fixtures

"""Fixtures shared with the integration tests of the same room."""

from tests.integration.engine.conftest import *  # noqa: F403 - fixtures

"""Fixtures shared with the integration tests of the same room."""

from tests.integration.hostile.conftest import *  # noqa: F403 - fixtures

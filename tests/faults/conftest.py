"""What tests of jobs that fail have in common."""

import uuid

import pytest
from helpers.launcher import kill_started


@pytest.fixture(autouse=True)
def _end_jobs():
    """Kills the job of a failed test, which would slow down all later tests."""
    yield
    kill_started()


@pytest.fixture
def marker():
    """A word that every process of the test's job carries in its environment."""
    return f"mark-{uuid.uuid4().hex}"

"""What tests of jobs that fail have in common."""

import uuid

import pytest


@pytest.fixture
def marker():
    """A word that every process of the test's job carries in its environment."""
    return f"mark-{uuid.uuid4().hex}"
